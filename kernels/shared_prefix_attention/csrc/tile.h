// A tile: a range of a row's or a node's positions, whose packed KV fits in a core's cache.
#pragma once
#include <cstdint>

namespace {

// Measured: 128 was the fastest, or equally fast, for all shapes but the shortest.
constexpr int kTile = 128;
// Part of a tile that is within one block: vLLM's CPU block sizes are multiples of it.
constexpr int kSubTile = 32;

template <class Element>
struct Tile {
  const Element* keys[kTile / kSubTile];
  const Element* values[kTile / kSubTile];
  int tokens;             // a multiple of kSubTile, of which positions [low, high) are valid
  int low, high;
  int query, num_queries;  // range of the unit's queries
  int causal_heads;        // 0: no mask; else causal mask, with this many heads per query token
  int end;                 // positions visible to the row's last token; one less per earlier token

  int visible_end(int query_in_tile) const {
    if (!causal_heads) return kTile;
    const int last_token = num_queries / causal_heads - 1;
    return end - (last_token - query_in_tile / causal_heads);
  }
};

}  // namespace
