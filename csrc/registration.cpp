// Operator schemas, and the empty Python module whose import registers them.
#include <Python.h>
#include <torch/csrc/stable/library.h>

extern "C" PyObject* PyInit__C(void) {
  static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}

// What every attention operator takes after its main tensors; attnkit/spec.py documents it.
#define ATTNKIT_ARGUMENTS                                                                        \
  "Tensor? bias, Tensor? sinks, Tensor? keep, Tensor? lengths, Tensor? q_segments, "             \
  "Tensor? k_segments, Tensor? blocks, Tensor? alibi, Tensor? seed, Tensor? cu_seqlens_q, "      \
  "Tensor? cu_seqlens_k, float scale, int? left, int? right, bool bottom_right, float softcap, " \
  "float dropout_p"

STABLE_TORCH_LIBRARY(attnkit, m) {
  m.def("cpu_forward(Tensor q, Tensor k, Tensor v, " ATTNKIT_ARGUMENTS
        ") -> (Tensor out, Tensor lse)");
  m.def(
      "cpu_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse, " ATTNKIT_ARGUMENTS
      ", bool want_dq, bool want_dk, bool want_dv, bool want_dbias, bool want_dsinks) -> "
      "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)");
  m.def("cpu_decode(Tensor q, Tensor k, Tensor v, " ATTNKIT_ARGUMENTS
        ", Tensor? starts=None, Tensor? block_table=None, Tensor? batch_index=None, "
        "Tensor? k_scale=None, Tensor? v_scale=None) -> (Tensor out, Tensor lse)");
  m.def(
      "cpu_append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor lengths, Tensor? block_table, "
      "Tensor? batch_index, Tensor? cos, Tensor? sin, bool interleaved) -> ()");
  m.def("cpu_probe_fma(int iterations) -> int");
  m.def("cpu_probe_read(Tensor data) -> float");
  m.def("cpu_instruction_sets() -> str");
}
