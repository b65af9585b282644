// Tiled attention over vLLM's packed `vec` cache, generic over the instruction set.
#pragma once
#include "gather.h"
#include "softmax.h"

namespace {

template <class F>
class Attend {
  using Element = typename F::Element;
  using Weight = typename F::Weight;
  static constexpr int kRows = F::kMostRows;

 public:
  static size_t packed_bytes(int size) { return 2 * sizeof(Weight) * kTile * size; }

  Attend(int size, int block_size, float factor, char* packed)
      : size_(size), block_size_(block_size), weigh_(size, block_size, factor, packed),
        gather_(size, packed + packed_bytes(size) / 2) {}

  // Prefetching the next tile is spread evenly over the passes over this one.
  void run(const Tile<Element>& tile, const Gathered<F>& all, const Tile<Element>* ahead) {
    Prefetch prefetch;
    if (ahead) list(*ahead, prefetch);
    const int passes = (tile.num_queries + kRows - 1) / kRows;
    if (passes == 1)
      pass_of_some<kCache, 4>(tile.num_queries, {tile, some_of(all, tile.query), 0, &prefetch});
    else if (passes < 4)
      pack_and_pass<4>(tile, all, prefetch);
    else if (passes < 8)
      pack_and_pass<2>(tile, all, prefetch);
    else
      pack_and_pass<1>(tile, all, prefetch);
    prefetch.ask_for_the_rest();
  }

 private:
  template <int kAsked>
  void pack_and_pass(const Tile<Element>& tile, const Gathered<F>& all, Prefetch& prefetch) {
    pass_of<kRows, kPacking, kAsked>({tile, some_of(all, tile.query), 0, &prefetch});
    for (int m = kRows; m < tile.num_queries; m += kRows)
      pass_of_some<kPacked, kAsked>(std::min(kRows, tile.num_queries - m),
                                    {tile, some_of(all, tile.query + m), m, &prefetch});
  }

  Gathered<F> some_of(const Gathered<F>& all, int first) const {
    return {all.queries + first * kQueryStride, all.outputs + first * size_, all.bases + first,
            all.sums + first * F::kWidth};
  }

  void list(const Tile<Element>& tile, Prefetch& prefetch) const {
    const int64_t row = block_size_ * sizeof(Element);
    for (int i = 0; i < tile.tokens; i += kSub) {
      const char* keys = reinterpret_cast<const char*>(tile.keys[i / kSub]);
      if (block_size_ == kSub) {
        prefetch.add(keys, Prefetch::kLine, size_ * row / Prefetch::kLine);
      } else {
        for (size_t half = 0; half < kSub * sizeof(Element); half += Prefetch::kLine)
          prefetch.add(keys + half, row, size_);
      }
      const int64_t bytes = int64_t(std::min(kSub, tile.high - i)) * size_ * sizeof(Element);
      prefetch.add(tile.values[i / kSub], Prefetch::kLine, bytes / Prefetch::kLine);
    }
  }

  template <Source kSource, int kAsked>
  void pass_of_some(int rows, const Pass<F>& pass) {
    switch (rows) {
      case 1: return pass_of<1, kSource, kAsked>(pass);
      case 2: return pass_of<2, kSource, kAsked>(pass);
      case 3: return pass_of<3, kSource, kAsked>(pass);
      case 4: return pass_of<4, kSource, kAsked>(pass);
    }
    if constexpr (kRows > 4) {
      switch (rows) {
        case 5: return pass_of<5, kSource, kAsked>(pass);
        case 6: return pass_of<6, kSource, kAsked>(pass);
        case 7: return pass_of<7, kSource, kAsked>(pass);
        case 8: return pass_of<8, kSource, kAsked>(pass);
      }
    }
  }

  template <int M, Source kSource, int kAsked>
  __attribute__((noinline)) void pass_of(const Pass<F>& pass) {
    alignas(64) Weight weights[M * kTile];
    float decay[M];
    weigh_.template run<M, kSource, kAsked>(pass, weights, decay);
    gather_.template run<M, kSource>(pass, weights, decay);
  }

  const int size_, block_size_;
  Weigh<F> weigh_;
  Gather<F> gather_;
};

}  // namespace
