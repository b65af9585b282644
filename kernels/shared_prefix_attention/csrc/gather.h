// Weighted sum of values.
#pragma once
#include "pass.h"

namespace {

template <class F>
class Gather {
  using Element = typename F::Element;
  using Weight = typename F::Weight;
  using Vector = typename F::Vector;
  using Operand = typename F::Operand;
  static constexpr int kSteps = kTile / F::kStep, kSubSteps = kSub / F::kStep;

 public:
  Gather(int size, char* packed) : size_(size), packed_(reinterpret_cast<Operand*>(packed)) {}

  template <int M, Source kSource>
  void run(const Pass<F>& pass, const Weight* weights, const float* decay) {
    constexpr int kColumns = M > 4 ? 2 : F::kColumns;
    int column = 0;
    for (; column + kColumns * F::kWidth <= size_; column += kColumns * F::kWidth)
      gather<M, kColumns, kSource>(pass, weights, decay, column);
    if constexpr (kColumns > 2)
      for (; column < size_; column += 2 * F::kWidth) gather<M, 2, kSource>(pass, weights, decay, column);
  }

 private:
  // Values are packed in pairs of vectors, for any number C of columns that a pass handles at once.
  // Not inlined, for the same reason as Weigh::weigh_all. If a tile has only one pass (kCache), it
  // prefetches the next tile here as well.
  template <int M, int C, Source kSource>
  __attribute__((noinline)) void gather(const Pass<F>& pass, const Weight* weights, const float* decay,
                                        int column) {
    constexpr int kAsked = kSource == kCache ? C : 0;
    const Tile<Element>& tile = pass.tile;
    const int size = size_;
    const Element* zeros = zeros_;
    float* outputs = pass.to.outputs + column;
    Operand* packed = packed_ + int64_t(column / F::kWidth) * kSteps;
    const auto place = [](int c) { return c / 2 * (2 * kSteps) + c % 2; };
    Vector sums[M][C];
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int c = 0; c < C; c++)
        sums[m][c] = F::mul(F::set(decay[m]), F::load(outputs + m * size + c * F::kWidth));
    for (int sub = 0; sub < tile.tokens; sub += kSub) {
      Lines lines[kAsked + 1];
      UNROLL for (int i = 0; i < kAsked; i++) lines[i] = pass.prefetch->take(kSubSteps);
      const Element* from = tile.values[sub / kSub] + column;
      const int low = tile.low - sub, high = tile.high - sub;
      // Memory outside [low, high) may contain NaN or infinity, and 0 * NaN is not 0.
      const auto row = [=](int token) {
        return token >= low && token < high ? from + token * size : zeros;
      };
      for (int step = 0; step < kSubSteps; step++) {
        UNROLL for (int i = 0; i < kAsked; i++) Prefetch::ask(lines[i]);
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
      const Operand weight = F::spread(weights + m * kTile);
      UNROLL for (int c = 0; c < C; c++) sums[m][c] = F::dot(sums[m][c], weight, values[c]);
    }
  }

  const int size_;
  Operand* const packed_;
  alignas(64) Element zeros_[64] = {};
};

}  // namespace
