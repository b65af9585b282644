// Weighted sum of values.
#pragma once
#include "register_pass.h"

namespace {

template <class F>
class ValueSum {
  using Element = typename F::Element;
  using Weight = typename F::Weight;
  using Vector = typename F::Vector;
  using Operand = typename F::Operand;
  static constexpr int kSteps = kTile / F::kStep, kSubTileSteps = kSubTile / F::kStep;

 public:
  ValueSum(int size, char* packed) : size_(size), packed_(reinterpret_cast<Operand*>(packed)) {}

  template <int M, Source kSource>
  void run(const Pass<F>& pass, const Weight* weights, const float* output_scales) {
    constexpr int kColumns = M > 4 ? 2 : F::kColumns;
    int column = 0;
    for (; column + kColumns * F::kWidth <= size_; column += kColumns * F::kWidth)
      add_columns<M, kColumns, kSource>(pass, weights, output_scales, column);
    if constexpr (kColumns > 2)
      for (; column < size_; column += 2 * F::kWidth)
        add_columns<M, 2, kSource>(pass, weights, output_scales, column);
  }

 private:
  // Values are packed in pairs of vectors, for any number C of columns that a pass handles at once.
  // Not inlined, for the same reason as Softmax::exp_scores. If the passes over a tile read the cache
  // (kCache), they prefetch the next tile here as well.
  template <int M, int C, Source kSource>
  __attribute__((noinline)) void add_columns(const Pass<F>& pass, const Weight* weights,
                                             const float* output_scales, int column) {
    constexpr int kPrefetchLines = kSource == kCache ? C : 0;
    const Tile<Element>& tile = pass.tile;
    const int size = size_;
    const Element* zeros = zeros_;
    float* outputs = pass.to.outputs + column;
    Operand* packed = packed_ + int64_t(column / F::kWidth) * kSteps;
    const auto place = [](int c) { return c / 2 * (2 * kSteps) + c % 2; };
    Vector sums[M][C];
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int c = 0; c < C; c++)
        sums[m][c] = F::mul(F::set(output_scales[m]), F::load(outputs + m * size + c * F::kWidth));
    for (int sub = 0; sub < tile.tokens; sub += kSubTile) {
      Lines lines[kPrefetchLines + 1];
      UNROLL for (int i = 0; i < kPrefetchLines; i++) lines[i] = pass.prefetch->take(kSubTileSteps);
      const Element* from = tile.values[sub / kSubTile] + column;
      const int low = tile.low - sub, high = tile.high - sub;
      // Memory outside [low, high) may contain NaN or infinity, and 0 * NaN is not 0.
      const auto row = [=](int token) {
        return token >= low && token < high ? from + token * size : zeros;
      };
      for (int step = 0; step < kSubTileSteps; step++) {
        UNROLL for (int i = 0; i < kPrefetchLines; i++) Prefetch::issue(lines[i]);
        Operand values[C];
        if (kSource == kPacked) {
          UNROLL for (int c = 0; c < C; c++) values[c] = F::get(packed + place(c));
        } else {
          const int token = step * F::kStep;
          F::template values<C>(row(token), row(token + F::kStep - 1), values);
        }
        if (kSource == kPacking) UNROLL for (int c = 0; c < C; c++) F::put(packed + place(c), values[c]);
        product<M, C>(sums, values, weights);
        packed += 2;
        weights += F::kStep;
      }
    }
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int c = 0; c < C; c++) F::store(outputs + m * size + c * F::kWidth, sums[m][c]);
  }

  template <int M, int C>
  static INLINE void product(Vector (&sums)[M][C], const Operand* values, const Weight* weights) {
    UNROLL for (int m = 0; m < M; m++) {
      const Operand weight = F::broadcast(weights + m * kTile);
      UNROLL for (int c = 0; c < C; c++) sums[m][c] = F::dot(sums[m][c], weight, values[c]);
    }
  }

  const int size_;
  Operand* const packed_;
  alignas(64) Element zeros_[64] = {};
};

}  // namespace
