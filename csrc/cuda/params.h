// The boundary between the operators and the CUDA kernels: raw pointers, element strides, a stream.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace attnkit::cuda {

// Positions stay far enough from the ends of int that sums of three of them do not wrap.
constexpr int kFar = 1 << 29;
constexpr int kMaxSplits = 128;

// n / d for 0 <= n < 2^31 as a multiplication and a shift (Granlund, Montgomery: Division by
// invariant integers using multiplication, 1994): a division costs a page look-up its latency.
struct Divisor {
  uint32_t d = 1, magic = 1, shift = 0;
};
Divisor divisor(uint32_t d);

// Which position among the keys query 0 has.
enum class Origin : int32_t { kFirstKey, kLastOfLength, kLastOfCapacity };

// How a call's keys are split among blocks; see plan().
struct Plan {
  int row_tile = 16;   // rows (queries x heads of a group) of a block
  int row_tiles = 1;   // of a kv head
  int splits = 1;      // at most this many blocks share the keys of a row tile
  int min_keys = 256;  // no split is given fewer, if there are as many
};

struct DecodeParams {
  Array q, out;            // [batch, q_heads, queries, column]
  Array k, v;              // [page, kv_heads, slot, column]; "page" is a row of a contiguous cache
  Array k_scale, v_scale;  // float32 [page, kv_heads, slot], of 8-bit k and v
  float* lse;              // [batch, q_heads, queries]
  int batch, q_heads, kv_heads, group, queries, head_dim, value_dim;

  int pages, page_slots, capacity;  // capacity: slots of a sequence
  Divisor by_page;
  const int32_t* lengths;      // [batch], or nullptr: the capacity
  int added;                   // tokens that have been appended to each since, by the same call
  const int32_t* starts;       // [batch], or nullptr: 0
  const int32_t* block_table;  // [batch, table_width], or nullptr
  const int32_t* batch_index;  // [batch], or nullptr: sequence b is row b
  int table_width;
  const uint8_t* keep;  // [batch, capacity], or nullptr
  const float* sinks;   // [q_heads], or nullptr
  const float* alibi;   // slopes [batch or 1, q_heads], or nullptr
  int alibi_batch;      // its stride: q_heads or 0

  float scale, softcap;
  int left, right;  // key j is visible when -left <= j - position <= right; kFar: no limit
  Origin origin;

  Plan plan;
  float* part_out;  // [batch, kv_heads, rows, splits, value_dim]; both nullptr with one split
  float* part_sum;  // [batch, kv_heads, rows, splits, 2]: maximum and sum, base 2
};

struct AppendCall {
  Array k, v;              // [batch, heads, tokens, column]
  Array k_cache, v_cache;  // as in DecodeParams
  Array k_scale, v_scale;
  int batch, heads, tokens, head_dim, value_dim;
  int pages, page_slots, capacity;
  Divisor by_page;
  const int32_t* lengths;  // token t of sequence b goes to slot lengths[b] + t
  const int32_t *block_table, *batch_index;
  int table_width;
  const float *cos, *sin;  // [positions, rotary_dim / 2], or nullptr
  int positions, rotary_dim;
  bool interleaved;

  // Queries to be rotated beside the keys, as the attention that follows takes them, or data
  // nullptr.
  Array q, q_out;  // [batch, q_heads, queries, column]
  int q_heads, queries;
  int query_step;  // query i of sequence b stands at position lengths[b] + i * query_step
};

// Splits as asked for: kByLength makes them a function of each sequence's own length, so that no
// bit depends on the rest of the batch; kFill of how many blocks fill the machine; or a number.
constexpr int kByLength = 0, kFill = -1;

// nullptr, or why the kernels cannot serve a call of these sizes and dtypes.
const char* refusal(const DecodeParams& p);
Plan plan(const DecodeParams& p, int splits, int multiprocessors);
// The numbers of floats that part_out and part_sum have to hold.
int64_t part_out_size(const DecodeParams& p);
int64_t part_sum_size(const DecodeParams& p);

cudaError_t decode(const DecodeParams& p, cudaStream_t stream);
cudaError_t append(const AppendCall& p, cudaStream_t stream);

}  // namespace attnkit::cuda
