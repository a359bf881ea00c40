// Attention and its gradient as operators: tensors in, AttentionParams to the kernels, tensors out.
#include "call.h"

namespace attnkit {
namespace {

// Rows that belong to no packed sequence are defined, too: output 0, lse -inf.
void clear_outside(const Call& call, Tensor& out, Tensor& lse) {
  const AttentionParams& p = call.p;
  int64_t covered = 0;
  for (const Sequence& s : call.sequences) covered += s.entry == 0 ? s.lq : 0;
  const bool packed_with_gaps = p.sequences == 0 || covered < p.q_rows;
  if (!packed_with_gaps) return;
  torch::stable::zero_(out);
  torch::stable::fill_(lse, -static_cast<double>(INFINITY));
}

// Packing pays from some 64 rows per kv head on; below, keys are read where they lie.  The two ways
// add in different orders, so the choice may depend on nothing that a prefix of a causal call
// changes: top-left causal calls, and calls with as many queries as keys, are always packed.
bool prefers_decode(const AttentionParams& p, const Options& o) {
  constexpr int64_t kFewRows = 64;
  const bool causal_from_top = !o.bottom_right && o.right.has_value();
  return p.q_rows * p.q_heads <= kFewRows * p.kv_heads && p.q_rows < p.k_rows && !causal_from_top &&
         o.dropout_p == 0 && !o.blocks.has_value() && !o.cu_seqlens_q.has_value() &&
         p.k.column == 1 && p.v.column == 1;
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   ATTNKIT_PARAMETERS) {
  const ATTNKIT_OPTIONS;
  Call call(q, k, v, options);
  Tensor out = empty_like_layout(q, v.size(3));
  Tensor lse = empty<3>({q.size(0), q.size(1), q.size(2)}, lse_dtype(q));
  if (cu_seqlens_q.has_value()) clear_outside(call, out, lse);
  call.p.out = array_of(out, "out");
  call.p.lse = lse.mutable_data_ptr();
  const Kernels& set = kernels_for(call.p.q.dtype);
  const Team team = team_for(call.flops);
  if (prefers_decode(call.p, options)) {
    const Slots slots(k, q.size(0), std::nullopt, std::nullopt);
    call.p.pages = slots.pages;
    set.decode(call.p, team);
  } else {
    set.forward(call.p, team);
  }
  return {out, lse};
}
// Whether some lse is too coarse to hold the sum of its row (see row_sums.inl).
template <class T>
bool any_coarse(const void* lse, int64_t n) {
  const T* from = static_cast<const T*>(lse);
  return std::any_of(from, from + n,
                     [](T x) { return std::abs(x) >= kCoarse<T> && std::abs(x) < INFINITY; });
}

// An empty gradient stands for "not wanted".
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients backward(const Tensor& dout, const MaybeTensor& dlse, const Tensor& q, const Tensor& k,
                   const Tensor& v, const Tensor& out, const Tensor& lse, ATTNKIT_PARAMETERS,
                   bool want_dq, bool want_dk, bool want_dv, bool want_dbias, bool want_dsinks) {
  const ATTNKIT_OPTIONS;
  Call call(q, k, v, options);
  AttentionParams& p = call.p;
  const ScalarType real = lse_dtype(q);
  STD_TORCH_CHECK(dout.scalar_type() == q.scalar_type() && lse.scalar_type() == real,
                  "dout must have the dtype of q, and lse the accumulation dtype");
  p.dout = array_of(dout, "dout");
  p.out = array_of(out, "out");
  const Tensor whole_lse = lse.is_contiguous() ? lse : torch::stable::contiguous(lse);
  const MaybeTensor whole_dlse = contiguous(dlse, real, "dlse");
  p.lse = const_cast<void*>(whole_lse.const_data_ptr());
  p.dlse = data_of<void>(whole_dlse);

  const auto none = [&] { return empty<1>({0}, q.scalar_type()); };
  const bool packed = cu_seqlens_q.has_value();
  // keys past a length, and rows of no sequence, are never visited: their gradient is 0
  const auto gradient = [&](bool wanted, const Tensor& of, bool partly, Array& array) {
    if (!wanted) return none();
    Tensor g = empty_like_layout(of, of.size(3));
    if (partly) torch::stable::zero_(g);
    array = array_of(g, "gradient");
    return g;
  };
  const bool partly = packed || lengths.has_value();
  Tensor dq = gradient(want_dq, q, packed, p.dq);
  Tensor dk = gradient(want_dk, k, partly, p.dk);
  Tensor dv = gradient(want_dv, v, partly, p.dv);
  const Team team = team_for(2.5 * call.flops);

  std::optional<Tensor> low;
  const int64_t rows = whole_lse.numel();
  if (real == ScalarType::Double ? any_coarse<double>(p.lse, rows)
                                 : any_coarse<float>(p.lse, rows)) {
    low = empty<3>({q.size(0), q.size(1), q.size(2)}, real);
    torch::stable::zero_(*low);
    p.low = low->mutable_data_ptr();
    kernels_for(p.q.dtype).row_sums(p, team);
  }

  const int64_t slots = (p.max_lq + kBlock - 1) / kBlock;
  std::vector<double> sink_sums;
  if (want_dsinks) {
    sink_sums.assign(p.sequences * p.q_heads * slots, 0.0);
    p.dsinks = sink_sums.data();
  }
  // A bias of which no entry was broadcast gets its gradient on the way; else in a pass of its own.
  Tensor dbias = none();
  bool broadcast = packed;
  if (want_dbias) {
    std::array<int64_t, 4> sizes;
    for (int64_t d = 0; d < 4; ++d) {
      sizes[d] = bias->stride(d) == 0 ? 1 : bias->size(d);
      broadcast |= sizes[d] != bias->size(d);
    }
    dbias = empty(sizes, bias->scalar_type());
    if (!broadcast || lengths.has_value() || call.flops == 0) torch::stable::zero_(dbias);
    p.bias_batch = sizes[0], p.bias_head = sizes[1], p.bias_row = sizes[2];
    p.bias_column = sizes[3];
    if (!broadcast) p.dbias = array_of(dbias, "dbias");
  }
  const bool direct = want_dbias && !broadcast;
  if (want_dq || want_dk || want_dv || want_dsinks || direct)
    kernels_for(p.q.dtype).backward(p, team);
  if (want_dbias && broadcast) {
    p.dbias = array_of(dbias, "dbias");
    kernels_for(p.q.dtype).bias_gradient(p, team);
  }

  Tensor dsinks = none();
  if (want_dsinks) {
    dsinks = empty<1>({p.q_heads}, sinks->scalar_type());
    for (int64_t h = 0; h < p.q_heads; ++h) {
      double sum = 0;
      for (int64_t s = 0; s < p.sequences; ++s)
        for (int64_t x = 0; x < slots; ++x) sum += sink_sums[(s * p.q_heads + h) * slots + x];
      if (dsinks.scalar_type() == ScalarType::Double)
        static_cast<double*>(dsinks.mutable_data_ptr())[h] = sum;
      else
        static_cast<float*>(dsinks.mutable_data_ptr())[h] = static_cast<float>(sum);
    }
  }
  return {dq, dk, dv, dbias, dsinks};
}

}  // namespace
}  // namespace attnkit
STABLE_TORCH_LIBRARY_IMPL(attnkit, CPU, m) {
  m.impl("cpu_forward", TORCH_BOX(&attnkit::forward));
  m.impl("cpu_backward", TORCH_BOX(&attnkit::backward));
}
