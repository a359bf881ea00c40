// Which kernel serves a call, and how its keys are split.
#include "decode.cuh"

namespace attnkit::cuda {

cudaError_t merge(const DecodeParams& p, cudaStream_t stream);
#define ATTNKIT_DECLARE(D, DV) \
  extern template cudaError_t decode_dims<D, DV>(const DecodeParams&, cudaStream_t);
ATTNKIT_HEAD_DIMS(ATTNKIT_DECLARE)
#undef ATTNKIT_DECLARE

Divisor divisor(uint32_t d) {
  Divisor r;
  r.d = d;
  while ((uint64_t{1} << r.shift) < d) ++r.shift;
  r.magic = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << r.shift) - d)) / d + 1);
  return r;
}

const char* refusal(const DecodeParams& p) {
  bool known = false;
#define ATTNKIT_KNOWN(D, DV) known |= p.head_dim == D && p.value_dim == DV;
  ATTNKIT_HEAD_DIMS(ATTNKIT_KNOWN)
#undef ATTNKIT_KNOWN
  if (!known) return "there is no CUDA kernel for these head dims";
  if (p.capacity >= kFar || p.queries >= kFar) return "a sequence has more than 2^29 slots";
  return nullptr;
}

// The rows of a block decide how it computes: 1 for a single row, up to 16 share a tensor core's
// tile, more are taken 64 at a time; float32, which has no tensor cores, 4 at a time.
//
// Splits by length: a row tile's keys are shared by ceil(keys / 256) blocks, but at most 128 in all
// of a kv head's row tiles.  So one head (MQA, batch 1) over 32768 keys is worked on by 128 blocks,
// about one per multiprocessor; what it costs a full grid is writing and reading a share of
// value_dim floats per row and 256 keys.  To fill: as many splits as multiprocessors have room for
// (two blocks each) beyond what there is without splitting, so a full grid is not split at all.
Plan plan(const DecodeParams& p, int splits, int multiprocessors) {
  const int64_t rows = static_cast<int64_t>(p.group) * p.queries;
  Plan r;
  if (p.q.dtype == DType::kFloat32)
    r.row_tile = 4;
  else if (rows == 1 && bytes_of(p.k.dtype) == 2)
    r.row_tile = 1;
  else
    r.row_tile = rows <= 16 ? 16 : 64;
  r.row_tiles = static_cast<int>((rows + r.row_tile - 1) / r.row_tile);
  if (r.row_tiles == 0) return r;  // no queries
  const int useful = (p.capacity + r.min_keys - 1) / r.min_keys;
  if (splits > 0) {
    r.splits = splits;
    r.min_keys = 1;
  } else if (splits == kByLength) {
    r.splits = kMaxSplits / r.row_tiles;
  } else {
    const int64_t blocks = static_cast<int64_t>(p.batch) * p.kv_heads * r.row_tiles;
    r.splits = static_cast<int>(2 * multiprocessors / (blocks > 0 ? blocks : 1));
  }
  if (splits <= 0) r.splits = r.splits < useful ? r.splits : useful;
  if (r.splits > kMaxSplits) r.splits = kMaxSplits;
  if (r.splits < 1) r.splits = 1;
  return r;
}

int64_t part_sum_size(const DecodeParams& p) {
  if (p.plan.splits == 1) return 0;
  return static_cast<int64_t>(p.batch) * p.q_heads * p.queries * p.plan.splits * 2;
}

int64_t part_out_size(const DecodeParams& p) { return part_sum_size(p) / 2 * p.value_dim; }

cudaError_t decode(const DecodeParams& p, cudaStream_t stream) {
  const int64_t blocks = int64_t{p.batch} * p.kv_heads * p.plan.row_tiles * p.plan.splits;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaError_t error = cudaErrorInvalidValue;
#define ATTNKIT_RUN(D, DV) \
  if (p.head_dim == D && p.value_dim == DV) error = decode_dims<D, DV>(p, stream);
  ATTNKIT_HEAD_DIMS(ATTNKIT_RUN)
#undef ATTNKIT_RUN
  if (error != cudaSuccess || p.plan.splits == 1) return error;
  return merge(p, stream);
}

}  // namespace attnkit::cuda
