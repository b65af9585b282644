// Attention over vLLM's packed `vec` cache, written once for all instruction sets.
//
// A Format says how: Element as it lies in the cache, Weight as queries and probabilities are multiplied
// with it, Vector of kWidth floats, Operand of a product that takes kStep elements of the summed
// dimension at a time. Keys lie transposed, [head_size][block_size], so an operand holds many tokens;
// values lie [block_size][head_size], so an operand holds many dimensions. The first queries that pass
// over a tile pack it into operands, and those after them read it packed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "prefetch.h"
#include "tile.h"

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

// The maximum of no score. Finite, because the difference of two infinities is none.
constexpr float kNothing = -1e30f;

// A row's maximum is only raised by scores that are so far above it, in exponents of 2: until then
// weights may be above 1, which costs no precision, and nothing that was gathered has to be scaled.
constexpr float kSlack = 8;

// Queries lie this far apart whatever their size, up to 256: a loop over some of them needs one address.
constexpr int kQueryStride = 256 + 32;

// What the queries of a unit have gathered so far; maxima are of the exponents of 2.
template <class F>
struct Gathered {
  typename F::Weight* queries;  // [M, kQueryStride]
  float* outputs;               // [M, size], in the order of the format's lanes
  float* maxima;                // [M]
  float* sums;                  // [M, kWidth], a part of the sum in each
};

// Where operands come from: packed by queries before these, or from the cache, and then packed or not.
enum Source { kPacked, kPacking, kCache };

template <class F>
class Attend {
  using Element = typename F::Element;
  using Weight = typename F::Weight;
  using Vector = typename F::Vector;
  using Operand = typename F::Operand;
  static constexpr int kChunk = 2 * F::kWidth;  // tokens of a pair of vectors
  static constexpr int kRows = F::kMostRows;
  static constexpr int kSteps = kTile / F::kStep;

 public:
  static size_t packed_bytes(int size) { return 2 * sizeof(Weight) * kTile * size; }

  Attend(int size, int block_size, float factor, char* packed)
      : size_(size), block_size_(block_size), factor_(factor), keys_(packed),
        values_(packed + packed_bytes(size) / 2) {}

  void run(const Tile<Element>& tile, const Gathered<F>& all, const Tile<Element>* ahead) {
    Prefetch prefetch;
    if (ahead) list(*ahead, prefetch);
    const int passes = (tile.num_queries + kRows - 1) / kRows;
    prefetch.spread(passes * (tile.tokens / kChunk + tile.tokens / kSub * (size_ / (2 * F::kWidth))));
    for (int m = 0; m < tile.num_queries; m += kRows) {
      const int at = tile.query + m;
      const Gathered<F> some{all.queries + at * kQueryStride, all.outputs + at * size_,
                             all.maxima + at, all.sums + at * F::kWidth};
      const Pass pass{tile, some, m, &prefetch};
      const int rows = std::min(kRows, tile.num_queries - m);
      if (passes == 1)
        pass_of_some<kCache, 2>(rows, pass);
      else if (m == 0)
        passes == 2 ? pass_of<kRows, kPacking, 1>(pass) : pass_of<kRows, kPacking, 0>(pass);
      else
        passes == 2 ? pass_of_some<kPacked, 1>(rows, pass) : pass_of_some<kPacked, 0>(rows, pass);
    }
    prefetch.ask_for_the_rest();
  }

 private:
  struct Pass {
    const Tile<Element>& tile;
    const Gathered<F>& to;
    int query;  // the first one's place in the tile
    Prefetch* prefetch;
  };

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

  // kAsked lines of the next tile are asked for in each step: by the only pass over a tile two, by each
  // of two passes one. More passes than two ask for a few between their loops.
  template <Source kSource, int kAsked>
  void pass_of_some(int rows, const Pass& pass) {
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
  __attribute__((noinline)) void pass_of(const Pass& pass) {
    alignas(64) float scores[M * kTile];
    alignas(64) Weight weights[M * kTile];
    Vector highest[M];
    float decay[M];
    UNROLL for (int m = 0; m < M; m++) highest[m] = F::set(-INFINITY);
    score_all<M, kSource, kAsked>(pass, scores, highest);
    raise<M>(pass, highest, decay);
    weigh<M>(pass, scores, weights);
    gather_all<M, kSource, kAsked>(pass, weights, decay);
  }

  // The functions with the products are not inlined and hold what they use in variables of their own:
  // everything that a product needs has to stay in a register.
  template <int M, Source kSource, int kAsked>
  __attribute__((noinline)) void score_all(const Pass& pass, float* scores, Vector* highest) {
    Prefetch* const prefetch = pass.prefetch;
    for (int token = 0; token < pass.tile.tokens; token += kChunk)
      score<M, kSource, kAsked>(pass, token, scores + token, highest, prefetch);
  }

  template <int M, Source kSource, int kAsked>
  INLINE void score(const Pass& pass, int token, float* scores, Vector* highest, Prefetch* prefetch) {
    // With few queries several sums side by side, or each product would wait for the one before.
    constexpr int kSide = M <= 2 ? 2 : 1;
    const int steps = size_ / F::kStep, stride = block_size_;
    const Weight* queries = pass.to.queries;
    const Element* from = pass.tile.keys[token / kSub] + token % kSub;
    Operand* packed = reinterpret_cast<Operand*>(keys_) + int64_t(token / kChunk) * steps * 2;
    Vector sums[kSide][M][2];
    UNROLL for (int s = 0; s < kSide; s++)
      UNROLL for (int m = 0; m < M; m++) sums[s][m][0] = sums[s][m][1] = F::set(0.f);
    for (int start = 0; start < steps; start += 32) {
      const int end = std::min(start + 32, steps);
      Lines lines[kAsked + 1];
      UNROLL for (int i = 0; i < kAsked; i++) lines[i] = prefetch->take(32);
      for (int step = start; step < end; step += kSide) {
        UNROLL for (int s = 0; s < kSide; s++) {
          Operand low, high;
          if (kSource == kPacked) {
            low = F::get(packed);
            high = F::get(packed + 1);
          } else {
            F::keys(from, stride, low, high);
            from += F::kStep * stride;
          }
          if (kSource == kPacking) {
            F::put(packed, low);
            F::put(packed + 1, high);
          }
          packed += 2;
          UNROLL for (int i = 0; i < kAsked; i++) Prefetch::ask(lines[i]);
          UNROLL for (int m = 0; m < M; m++) {
            const Operand query = F::spread(queries + m * kQueryStride);
            sums[s][m][0] = F::dot(sums[s][m][0], query, low);
            sums[s][m][1] = F::dot(sums[s][m][1], query, high);
          }
          queries += F::kStep;
        }
      }
    }
    if (kAsked == 0) prefetch->ask_for_some();
    const Tile<Element>& tile = pass.tile;
    const bool whole = tile.low <= token && token + kChunk <= tile.high && !tile.causal_heads;
    UNROLL for (int m = 0; m < M; m++) {
      Vector low = sums[0][m][0], high = sums[0][m][1];
      if (kSide == 2) {
        low = F::add(low, sums[kSide - 1][m][0]);
        high = F::add(high, sums[kSide - 1][m][1]);
      }
      if (!whole) {
        const int end = std::min(tile.high, tile.seen_by(pass.query + m)) - token;
        low = F::within(low, 0, tile.low - token, end);
        high = F::within(high, 1, tile.low - token, end);
      }
      F::store(scores + m * kTile, low);
      F::store(scores + m * kTile + F::kWidth, high);
      highest[m] = F::max(highest[m], F::max(low, high));
    }
  }

  // What is gathered so far has to be multiplied with `decay` if a maximum is raised.
  template <int M>
  INLINE void raise(const Pass& pass, const Vector* highest, float* decay) {
    Vector above = F::set(-INFINITY);
    UNROLL for (int m = 0; m < M; m++)
      above = F::max(above, F::less(highest[m], F::set(factor_), F::set(pass.to.maxima[m])));
    UNROLL for (int m = 0; m < M; m++) decay[m] = 1;
    if (F::any_above(above, kSlack)) raise_to(pass, M, highest, decay);
  }

  __attribute__((noinline)) void raise_to(const Pass& pass, int rows, const Vector* highest, float* decay) {
    for (int m = 0; m < rows; m++) {
      const float before = pass.to.maxima[m], after = std::max(before, F::highest(highest[m]) * factor_);
      alignas(64) float factors[F::kWidth];
      F::store(factors, F::exp2(F::set(before - after)));
      decay[m] = factors[0];
      float* const sums = pass.to.sums + m * F::kWidth;
      F::store(sums, F::mul(F::load(sums), F::load(factors)));
      pass.to.maxima[m] = after;
    }
  }

  template <int M>
  INLINE void weigh(const Pass& pass, const float* scores, Weight* weights) {
    const Vector factor = F::set(factor_);
    UNROLL for (int m = 0; m < M; m++) {
      const Vector maximum = F::set(pass.to.maxima[m]);
      float* const sums = pass.to.sums + m * F::kWidth;
      Vector first = F::load(sums), second = F::set(0.f);
      for (int i = 0; i < pass.tile.tokens; i += kChunk) {
        const float* at = scores + m * kTile + i;
        const Vector low = F::exp2(F::less(F::load(at), factor, maximum));
        const Vector high = F::exp2(F::less(F::load(at + F::kWidth), factor, maximum));
        first = F::add(first, low);
        second = F::add(second, high);
        F::weights(weights + m * kTile + i, low, high);
      }
      F::store(sums, F::add(first, second));
    }
  }

  template <int M, Source kSource, int kAsked>
  INLINE void gather_all(const Pass& pass, const Weight* weights, const float* decay) {
    constexpr int kColumns = M > 4 ? 2 : F::kColumns;
    int column = 0;
    for (; column + kColumns * F::kWidth <= size_; column += kColumns * F::kWidth)
      gather<M, kColumns, kSource, kAsked * kColumns / 2>(pass, weights, decay, column);
    if constexpr (kColumns > 2)
      for (; column < size_; column += 2 * F::kWidth) gather<M, 2, kSource, kAsked>(pass, weights, decay, column);
  }

  template <int M, int C>
  static INLINE void product(Vector (&sums)[M][C], const Operand* values, const Weight* weights) {
    UNROLL for (int m = 0; m < M; m++) {
      const Operand weight = F::spread(weights + m * kTile);
      UNROLL for (int c = 0; c < C; c++) sums[m][c] = F::dot(sums[m][c], weight, values[c]);
    }
  }

  // Values are packed in pairs of vectors, whatever the number of columns that a pass takes at once.
  template <int M, int C, Source kSource, int kAsked>
  __attribute__((noinline)) void gather(const Pass& pass, const Weight* weights, const float* decay,
                                        int column) {
    constexpr int kSubSteps = kSub / F::kStep;
    const Tile<Element>& tile = pass.tile;
    Prefetch* const prefetch = pass.prefetch;
    const int size = size_;
    const Element* zeros = zeros_;
    float* outputs = pass.to.outputs + column;
    Operand* packed = reinterpret_cast<Operand*>(values_) + int64_t(column / F::kWidth) * kSteps;
    const auto place = [](int c) { return c / 2 * (2 * kSteps) + c % 2; };
    Vector sums[M][C];
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int c = 0; c < C; c++)
        sums[m][c] = F::mul(F::set(decay[m]), F::load(outputs + m * size + c * F::kWidth));
    for (int sub = 0; sub < tile.tokens; sub += kSub) {
      Lines lines[kAsked + 1];
      UNROLL for (int i = 0; i < kAsked; i++) lines[i] = prefetch->take(kSubSteps);
      const Element* from = tile.values[sub / kSub] + column;
      const int low = tile.low - sub, high = tile.high - sub;
      // Memory outside of the run may hold anything, and nothing times that is not nothing.
      const auto row = [=](int token) {
        return token >= low && token < high ? from + token * size : zeros;
      };
      for (int step = 0; step < kSubSteps; step++) {
        UNROLL for (int i = 0; i < kAsked; i++) Prefetch::ask(lines[i]);
        Operand values[C];
        if (kSource == kPacked) {
          UNROLL for (int c = 0; c < C; c++) values[c] = F::get(packed + place(c));
        } else {
          const int token = F::token_of(step);
          F::template values<C>(row(token), row(token + F::kStep - 1), values);
        }
        if (kSource == kPacking) UNROLL for (int c = 0; c < C; c++) F::put(packed + place(c), values[c]);
        product<M, C>(sums, values, weights);
        packed += 2;
        weights += F::kStep;
      }
      if (kAsked == 0) prefetch->ask_for_some();
    }
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int c = 0; c < C; c++) F::store(outputs + m * size + c * F::kWidth, sums[m][c]);
  }

  const int size_, block_size_;
  const float factor_;
  char *const keys_, *const values_;
  alignas(64) Element zeros_[64] = {};
};

}  // namespace
