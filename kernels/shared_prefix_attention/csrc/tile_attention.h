// Tiled attention over vLLM's packed `vec` cache, generic over the instruction set.
#pragma once
#include "value_sum.h"
#include "softmax.h"

namespace {

template <class F>
class TileAttention {
  using Element = typename F::Element;
  using Weight = typename F::Weight;
  static constexpr int kRows = F::kMaxRows;

 public:
  static size_t packed_bytes(int size) { return 2 * sizeof(Weight) * kTile * size; }

  TileAttention(int size, int block_size, float factor, char* packed)
      : size_(size), block_size_(block_size), softmax_(size, block_size, factor, packed),
        value_sum_(size, packed + packed_bytes(size) / 2) {}

  // Prefetching the next tile is spread evenly over the passes over this one.
  void run(const Tile<Element>& tile, const Accumulators<F>& all, const Tile<Element>* ahead) {
    Prefetch prefetch;
    if (ahead) add_lines(*ahead, prefetch);
    const int passes = (tile.num_queries + kRows - 1) / kRows;
    // Packing costs more than it saves if only one more pass reads what is packed.
    if (passes == 1)
      pass_from_cache<4>(tile, all, prefetch);
    else if (passes == 2)
      pass_from_cache<2>(tile, all, prefetch);
    else if (passes < 4)
      pack_and_pass<4>(tile, all, prefetch);
    else if (passes < 8)
      pack_and_pass<2>(tile, all, prefetch);
    else
      pack_and_pass<1>(tile, all, prefetch);
    prefetch.issue_rest();
  }

 private:
  template <int kPrefetchLines>
  void pass_from_cache(const Tile<Element>& tile, const Accumulators<F>& all, Prefetch& prefetch) {
    for (int m = 0; m < tile.num_queries; m += kRows)
      pass_of_some<kCache, kPrefetchLines>(std::min(kRows, tile.num_queries - m),
                                           {tile, slice(all, tile.query + m), m, &prefetch});
  }

  template <int kPrefetchLines>
  void pack_and_pass(const Tile<Element>& tile, const Accumulators<F>& all, Prefetch& prefetch) {
    pass_of<kRows, kPacking, kPrefetchLines>({tile, slice(all, tile.query), 0, &prefetch});
    for (int m = kRows; m < tile.num_queries; m += kRows)
      pass_of_some<kPacked, kPrefetchLines>(std::min(kRows, tile.num_queries - m),
                                            {tile, slice(all, tile.query + m), m, &prefetch});
  }

  Accumulators<F> slice(const Accumulators<F>& all, int first) const {
    return {all.queries + first * kQueryStride, all.outputs + first * size_, all.bases + first,
            all.sums + first * F::kWidth};
  }

  void add_lines(const Tile<Element>& tile, Prefetch& prefetch) const {
    const int64_t row = block_size_ * sizeof(Element);
    for (int i = 0; i < tile.tokens; i += kSubTile) {
      const char* keys = reinterpret_cast<const char*>(tile.keys[i / kSubTile]);
      if (block_size_ == kSubTile) {
        prefetch.add(keys, Prefetch::kLine, size_ * row / Prefetch::kLine);
      } else {
        for (size_t half = 0; half < kSubTile * sizeof(Element); half += Prefetch::kLine)
          prefetch.add(keys + half, row, size_);
      }
      const int64_t bytes = int64_t(std::min(kSubTile, tile.high - i)) * size_ * sizeof(Element);
      prefetch.add(tile.values[i / kSubTile], Prefetch::kLine, bytes / Prefetch::kLine);
    }
  }

  template <Source kSource, int kPrefetchLines>
  void pass_of_some(int rows, const Pass<F>& pass) {
    switch (rows) {
      case 1: return pass_of<1, kSource, kPrefetchLines>(pass);
      case 2: return pass_of<2, kSource, kPrefetchLines>(pass);
      case 3: return pass_of<3, kSource, kPrefetchLines>(pass);
      case 4: return pass_of<4, kSource, kPrefetchLines>(pass);
    }
    if constexpr (kRows > 4) {
      switch (rows) {
        case 5: return pass_of<5, kSource, kPrefetchLines>(pass);
        case 6: return pass_of<6, kSource, kPrefetchLines>(pass);
        case 7: return pass_of<7, kSource, kPrefetchLines>(pass);
        case 8: return pass_of<8, kSource, kPrefetchLines>(pass);
      }
    }
  }

  template <int M, Source kSource, int kPrefetchLines>
  __attribute__((noinline)) void pass_of(const Pass<F>& pass) {
    alignas(64) Weight weights[M * kTile];
    float output_scales[M];
    softmax_.template run<M, kSource, kPrefetchLines>(pass, weights, output_scales);
    value_sum_.template run<M, kSource>(pass, weights, output_scales);
  }

  const int size_, block_size_;
  Softmax<F> softmax_;
  ValueSum<F> value_sum_;
};

}  // namespace
