// Attention of new queries over a cache: out = softmax(scale * q k^T + mask) v, with its lse.
//
// A block has one row tile of one kv head and a share of its keys, which it meets tile by tile: the
// copy of the next one is under way while one is used.  Shares are added up by merge.cu.
#pragma once

#include "compute_mma.cuh"
#include "compute_vector.cuh"
#include "head_dims.h"

namespace attnkit::cuda {

template <class Compute>
__global__ void __launch_bounds__(kThreads, Compute::kBlocks) decode_kernel(const DecodeParams p) {
  const Work w = work_of_block<Compute::kTile>(p);
  if (w.first_tile >= w.end_tile &&
      p.part_out) {  // a share without keys: only its sum is looked at
    for (int row = threadIdx.x; row < w.rows; row += kThreads)
      write_sum(p, w, row, -INFINITY, 0.f, true);
    return;
  }
  Shared shared;
  typename Compute::KVTiles tiles(p, w, shared);
  Compute compute(p, w, tiles, shared);
  tiles.find(w.first_tile);
  tiles.find(w.first_tile + 1);
  __syncthreads();  // the places are known
  if (w.first_tile < w.end_tile) tiles.load(w.first_tile);
  if constexpr (Compute::kWidens) {  // what a tile was copied to is free once it has been widened
    if (w.first_tile + 1 < w.end_tile) tiles.load(w.first_tile + 1);
    for (int tile = w.first_tile; tile < w.end_tile; ++tile) {
      wait_for_all_but(tile + 1 < w.end_tile);
      tiles.find(tile + 2);
      __syncthreads();  // the copies of all threads have arrived, the tile before is used up
      compute.widen(tile);
      __syncthreads();  // the numbers are there, the places of the tile after the next are known
      if (tile + 2 < w.end_tile) tiles.load(tile + 2);
      compute.tile(tile);
    }
  } else {
    for (int tile = w.first_tile; tile < w.end_tile; ++tile) {
      __syncthreads();  // the tile before is used up, the places of the next are known
      if (tile + 1 < w.end_tile) tiles.load(tile + 1);
      wait_for_all_but(tile + 1 < w.end_tile);
      tiles.find(tile + 2);
      __syncthreads();  // the copies of all threads have arrived
      compute.tile(tile);
    }
  }
  compute.finish();
}

template <class Compute>
cudaError_t run_decode(const DecodeParams& p, cudaStream_t stream) {
  const int64_t blocks =
      static_cast<int64_t>(p.batch) * p.kv_heads * p.plan.row_tiles * p.plan.splits;
  return launch<decode_kernel<Compute>>(blocks, kThreads, Compute::kSharedBytes, stream, p);
}

// How many rows a block takes decides which way of computing it has; see plan().
template <class T, int kDim, int kValueDim>
cudaError_t decode_16_bit(const DecodeParams& p, cudaStream_t stream) {
  if (bytes_of(p.k.dtype) == 1) {
    if (p.plan.row_tile == 16)
      return run_decode<MmaCompute<T, true, kDim, kValueDim, 1>>(p, stream);
    return run_decode<MmaCompute<T, true, kDim, kValueDim, 4>>(p, stream);
  }
  if (p.plan.row_tile == 1) return run_decode<VectorCompute<T, 1, kDim, kValueDim>>(p, stream);
  if (p.plan.row_tile == 16) return run_decode<MmaCompute<T, false, kDim, kValueDim, 1>>(p, stream);
  return run_decode<MmaCompute<T, false, kDim, kValueDim, 4>>(p, stream);
}

template <int kDim, int kValueDim>
cudaError_t decode_dims(const DecodeParams& p, cudaStream_t stream) {
  if (p.q.dtype == DType::kBFloat16)
    return decode_16_bit<__nv_bfloat16, kDim, kValueDim>(p, stream);
  if (p.q.dtype == DType::kFloat16) return decode_16_bit<__half, kDim, kValueDim>(p, stream);
  if (bytes_of(p.k.dtype) == 1)
    return run_decode<VectorCompute<uint8_t, 4, kDim, kValueDim>>(p, stream);
  return run_decode<VectorCompute<float, 4, kDim, kValueDim>>(p, stream);
}

}  // namespace attnkit::cuda
