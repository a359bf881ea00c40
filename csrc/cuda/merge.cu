// The shares of splits become one result: a row's shares are weighted by their maxima.
#include "work.cuh"

namespace attnkit::cuda {
namespace {

// One block per row.
__global__ void __launch_bounds__(kThreads) merge_kernel(const DecodeParams p) {
  static_assert(kMaxSplits <= kThreads);
  Shared shared;
  float* weights = shared.take<float>(kMaxSplits);
  float* by_warp = shared.take<float>(2 * kWarps);
  const int64_t row = blockIdx.x;
  const int rows = p.group * p.queries, splits = p.plan.splits;
  const int r = static_cast<int>(row % rows), kv_head = static_cast<int>(row / rows % p.kv_heads);
  const int batch = static_cast<int>(row / rows / p.kv_heads);
  const int head = kv_head * p.group + r % p.group, query = r / p.group;

  const int own = threadIdx.x, warp = own / 32;
  float2 share = make_float2(-INFINITY, 0.f);
  if (own < splits) share = reinterpret_cast<const float2*>(p.part_sum)[row * splits + own];
  const float most = max_lanes<32>(share.x);
  if (own % 32 == 0) by_warp[warp] = most;
  __syncthreads();
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) top = fmaxf(top, by_warp[i]);
  const float weight = exp2f(share.x - pivot_of(top));
  const float part = sum_lanes<32>(share.y * weight);
  if (own % 32 == 0) by_warp[kWarps + warp] = part;
  // a share without keys wrote no columns
  if (own < splits) weights[own] = share.y == 0.f ? 0.f : weight;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += by_warp[kWarps + i];
  const RowEnd end = end_of_row(p, head, top, sum);
  if (own == 0)
    p.lse[(static_cast<int64_t>(batch) * p.q_heads + head) * p.queries + query] = end.lse;

  char* to = row_of(p.out, batch, head, query);
  for (int column = own; column < p.value_dim; column += kThreads) {
    const float* from = p.part_out + row * splits * p.value_dim + column;
    float x = 0;
    for (int i = 0; i < splits; ++i)
      if (weights[i] != 0.f) x = fmaf(weights[i], from[static_cast<int64_t>(i) * p.value_dim], x);
    store_value(p.out, to, column, end.weight == 0.f ? 0.f : x * end.weight);
  }
}

}  // namespace

cudaError_t merge(const DecodeParams& p, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.batch) * p.q_heads * p.queries;
  constexpr size_t kShared = shared_bytes<float>(kMaxSplits) + shared_bytes<float>(2 * kWarps);
  return launch<merge_kernel>(rows, kThreads, kShared, stream, p);
}

}  // namespace attnkit::cuda
