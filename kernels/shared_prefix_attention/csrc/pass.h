// A pass: up to a handful of queries, whose sums fit into registers, over one tile.
//
// A Format says how: Element as it lies in the cache, Weight as queries and probabilities are multiplied
// with it, Vector of kWidth floats, Operand of a product that takes kStep elements of the summed
// dimension at a time. Keys lie transposed, [head_size][block_size], so an operand holds many tokens;
// values lie [block_size][head_size], so an operand holds many dimensions. The first queries that pass
// over a tile pack it into operands, and those after them read it packed.
#pragma once
#include "prefetch.h"
#include "tile.h"

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

// The base of no score. Finite, because the difference of two infinities is none.
constexpr float kNothing = -1e30f;

// Queries lie this far apart whatever their size, up to 256: a loop over some of them needs one address.
constexpr int kQueryStride = 256 + 32;

// What the queries of a unit have gathered so far, relative to 2 to the power of their bases.
template <class F>
struct Gathered {
  typename F::Weight* queries;  // [M, kQueryStride]
  float* outputs;               // [M, size], in the order of the format's lanes
  float* bases;                 // [M]
  float* sums;                  // [M, kWidth], a part of the sum in each
};

template <class F>
struct Pass {
  const Tile<typename F::Element>& tile;
  Gathered<F> to;
  int query;  // the first one's place in the tile
  Prefetch* prefetch;
};

// Where operands come from: packed by queries before these, or from the cache, and then packed or not.
enum Source { kPacked, kPacking, kCache };

}  // namespace
