// Operator schemas, and the empty Python module whose import registers them.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "schemas.h"

extern "C" PyObject* PyInit__C(void) {
  static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}

STABLE_TORCH_LIBRARY(attnkit, m) {
  m.def("cpu_forward(Tensor q, Tensor k, Tensor v, " ATTNKIT_ARGUMENTS
        ") -> (Tensor out, Tensor lse)");
  m.def(
      "cpu_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse, " ATTNKIT_ARGUMENTS
      ", bool want_dq, bool want_dk, bool want_dv, bool want_dbias, bool want_dsinks) -> "
      "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)");
  m.def("cpu_decode(Tensor q, Tensor k, Tensor v, " ATTNKIT_ARGUMENTS ", " ATTNKIT_CACHE_ARGUMENTS
        ") -> (Tensor out, Tensor lse)");
  m.def("cpu_append(" ATTNKIT_APPEND_ARGUMENTS ") -> ()");
  m.def("cpu_extend(" ATTNKIT_EXTEND_ARGUMENTS ") -> (Tensor out, Tensor lse)");
  m.def("cpu_probe_fma(int iterations) -> int");
  m.def("cpu_probe_read(Tensor data) -> float");
  m.def("cpu_instruction_sets() -> str");
}
