// A run of a row's or a node's positions, short enough that it stays packed in a core's cache.
#pragma once
#include <cstdint>

namespace {

// 128 was the fastest, or level, at every shape but the shortest.
constexpr int kTile = 128;
// A part that lies within one block: vLLM's block sizes for CPUs are its multiples.
constexpr int kSub = 32;

template <class Element>
struct Tile {
  const Element* keys[kTile / kSub];
  const Element* values[kTile / kSub];
  int tokens;             // whole parts, of which positions [low, high) count
  int low, high;
  int query, num_queries;  // of the unit's
  int causal_heads;        // 0: all queries see all; else: so many heads to a token of the row, and
  int end;                 // the row's last token sees this many positions, each before it one less

  int seen_by(int query_in_tile) const {
    if (!causal_heads) return kTile;
    const int last_token = num_queries / causal_heads - 1;
    return end - (last_token - query_in_tile / causal_heads);
  }
};

}  // namespace
