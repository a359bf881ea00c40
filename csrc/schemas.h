// What the operators' schemas have in common.
#pragma once

// What every attention operator takes after its main tensors; attnkit/spec.py documents it.
#define ATTNKIT_ARGUMENTS                                                                        \
  "Tensor? bias, Tensor? sinks, Tensor? keep, Tensor? lengths, Tensor? q_segments, "             \
  "Tensor? k_segments, Tensor? blocks, Tensor? alibi, Tensor? seed, Tensor? cu_seqlens_q, "      \
  "Tensor? cu_seqlens_k, float scale, int? left, int? right, bool bottom_right, float softcap, " \
  "float dropout_p"

// What a decoding operator takes after these.
#define ATTNKIT_CACHE_ARGUMENTS                                               \
  "Tensor? starts=None, Tensor? block_table=None, Tensor? batch_index=None, " \
  "Tensor? k_scale=None, Tensor? v_scale=None"

#define ATTNKIT_APPEND_ARGUMENTS                                                                 \
  "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, "            \
  "Tensor(d!)? v_scale, Tensor lengths, Tensor? block_table, Tensor? batch_index, Tensor? cos, " \
  "Tensor? sin, bool interleaved"

// What appends and attends in one call: the queries [B, Hq, Lq, D] come with k, v [B, Hkv, n, .],
// which go behind `lengths`, as with append.  With a query_step query i of sequence b is rotated as
// one at position lengths[b] + i * query_step.
#define ATTNKIT_EXTEND_ARGUMENTS                                                             \
  "Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, " ATTNKIT_ARGUMENTS \
  ", Tensor? starts, Tensor? block_table, Tensor? batch_index, Tensor(c!)? k_scale, "        \
  "Tensor(d!)? v_scale, Tensor? cos, Tensor? sin, bool interleaved, int? query_step"
