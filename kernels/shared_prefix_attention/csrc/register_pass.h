// A pass: attention of a few queries, whose accumulators fit in registers, over one tile.
//
// The template parameter F (format) defines: Element, the type in the cache; Weight, the type of
// queries and probabilities in products; Vector of kWidth floats; Operand of a product over kStep
// elements of the summed dimension. Keys are stored transposed, [head_size][block_size], so an
// operand has several tokens. Values are stored [block_size][head_size], so an operand has several
// dimensions. If a tile has three or more passes, the first packs it into operands, which later passes
// read.
#pragma once
#include "prefetch.h"
#include "tile.h"

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

// Base of a query without scores. Finite, because the difference of two infinities is NaN.
constexpr float kNoScores = -1e30f;

// Stride of queries for every head size up to 256. Constant, so that a loop needs one address only.
constexpr int kQueryStride = 256 + 32;

// Accumulators of a unit's queries, scaled by 2^-base.
template <class F>
struct Accumulators {
  typename F::Weight* queries;  // [M, kQueryStride]
  float* outputs;               // [M, size], in the lane order of the format
  float* bases;                 // [M]
  float* sums;                  // [M, kWidth], partial sums
};

template <class F>
struct Pass {
  const Tile<typename F::Element>& tile;
  Accumulators<F> to;
  int query;  // index of the first query in the tile
  Prefetch* prefetch;
};

// Source of operands: packed by an earlier pass, or the cache with or without packing them.
enum Source { kPacked, kPacking, kCache };

}  // namespace
