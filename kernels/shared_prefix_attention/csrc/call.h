// Arguments of one layer in a decode step; the `KernelCall` structure in cpu.py mirrors `Call`.
#pragma once
#include <cstdint>

enum Element : int32_t { kBfloat16 = 0, kFloat32 = 1 };
enum Isa : int32_t { kAvx2 = 1, kAvx512Bfloat16 = 2 };

// Strides are in elements. T tokens, R rows, Hq query heads, D head size.
struct Call {
  const void* query;  // [T, Hq, D]
  int64_t query_stride;
  const void* cache;  // [blocks, Hkv, {keys [D, block], values [block, D]}], vLLM's `vec` layout
  int64_t block_stride, head_stride;
  void* out;  // [T, Hq, D]
  int64_t out_stride;
  float* lse;                  // [T, Hq] or null; natural logarithm
  const float* sinks;          // [Hq] or null; logits without a value
  const int32_t* block_table;  // [R, width]
  int64_t block_table_stride;
  const int32_t* seq_lens;      // [R]
  const int32_t* query_starts;  // [R + 1], into T

  const int32_t* node_blocks;
  const int32_t* node_block_offsets;
  const int32_t* node_tokens;
  const int32_t* node_rows;
  const int32_t* node_row_offsets;
  const int32_t* suffix_starts;  // [R]

  int32_t num_nodes, num_rows, num_heads, num_kv_heads, head_size, block_size;  // D <= 256
  int32_t element, isa, num_threads;
  float scale;

  int heads_per_kv() const { return num_heads / num_kv_heads; }
  int query_tokens(int row) const { return query_starts[row + 1] - query_starts[row]; }
  int queries(int row) const { return query_tokens(row) * heads_per_kv(); }
};
