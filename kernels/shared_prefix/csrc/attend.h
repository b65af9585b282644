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

// 2^t for t <= 0 by a shift of the exponent and a polynomial, within 1e-7 of it. Exactly 1 at 0: a
// factor that is a little less would be applied once for every tile.
template <class F>
INLINE typename F::Vector exp2_of(typename F::Vector t) {
  using Vector = typename F::Vector;
  const Vector magic = F::set(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
  t = F::max(t, F::set(-126.f));
  const Vector whole = F::add(t, magic), part = F::sub(t, F::sub(whole, magic));
  Vector p = F::fma(part, F::set(1.3264727e-3f), F::set(9.671513e-3f));
  p = F::fma(p, part, F::set(5.5507336e-2f));
  p = F::fma(p, part, F::set(2.4022242e-1f));
  p = F::fma(p, part, F::set(6.931470e-1f));
  p = F::fma(p, part, F::set(1.f));
  return F::shift_exponent(p, whole);
}

// Queries lie this far apart whatever their size, up to 256: a loop over some of them needs one address.
constexpr int kQueryStride = 256 + 32;

// What the queries of a unit have gathered so far; maxima are of the exponents of 2.
template <class Weight>
struct Gathered {
  Weight* queries;  // [M, kQueryStride]
  float* outputs;   // [M, size], in the order of the format's lanes
  float* maxima;
  float* sums;
};

// Where operands come from: packed by queries before these, or from the cache, and then packed or not.
// All but kQuiet, which is as kPacked, ask for the lines of the next tile meanwhile.
enum Source { kPacked, kPacking, kCache, kQuiet };

template <class F>
class Attend {
  using Element = typename F::Element;
  using Weight = typename F::Weight;
  using Vector = typename F::Vector;
  using Operand = typename F::Operand;
  static constexpr int kChunk = 2 * F::kWidth;  // tokens of a pair of vectors
  static constexpr int kRows = F::kMostRows;
  static constexpr int kHalf = 4;  // of them are all that the registers hold with kColumns operands

 public:
  static size_t packed_bytes(int size) { return 2 * sizeof(Weight) * kTile * size; }

  Attend(int size, int block_size, float factor, char* packed)
      : size_(size), block_size_(block_size), factor_(factor), keys_(packed),
        values_(packed + packed_bytes(size) / 2) {}

  void run(const Tile<Element>& tile, const Gathered<Weight>& all, const Tile<Element>* ahead) {
    Prefetch prefetch;
    if (ahead) list(*ahead, prefetch);
    const bool one_pass = tile.num_queries <= kRows;
    for (int m = 0; m < tile.num_queries; m += kRows) {
      const int at = tile.query + m;
      const Gathered<Weight> some{all.queries + at * kQueryStride, all.outputs + at * size_,
                                  all.maxima + at, all.sums + at};
      const Source source = m >= 2 * kRows ? kQuiet : m > 0 ? kPacked : one_pass ? kCache : kPacking;
      Pass pass{tile, some, m, source, one_pass, &prefetch};
      pass_of_some(std::min(kRows, tile.num_queries - m), pass);
    }
    prefetch.ask_for_the_rest();
  }

 private:
  struct Pass {
    const Tile<Element>& tile;
    const Gathered<Weight>& to;
    int query;  // the first one's place in the tile
    Source source;
    bool twice;  // prefetches two lines a step: no other pass will
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

  void pass_of_some(int rows, const Pass& pass) {
    switch (rows) {
      case 1: return pass_of<1>(pass);
      case 2: return pass_of<2>(pass);
      case 3: return pass_of<3>(pass);
      case 4: return pass_of<4>(pass);
    }
    if constexpr (kRows > 4) {
      switch (rows) {
        case 5: return pass_of<5>(pass);
        case 6: return pass_of<6>(pass);
        case 7: return pass_of<7>(pass);
        case 8: return pass_of<8>(pass);
      }
    }
  }

  template <int M>
  __attribute__((noinline)) void pass_of(const Pass& pass) {
    alignas(64) float scores[M * kTile];
    alignas(64) Weight weights[M * kTile];
    Vector highest[M];
    float decay[M];
    UNROLL for (int m = 0; m < M; m++) highest[m] = F::set(-INFINITY);
    switch (pass.source) {
      case kPacked: score_all<M, kPacked>(pass, scores, highest); break;
      case kPacking: score_all<M, kPacking>(pass, scores, highest); break;
      case kCache: score_all<M, kCache>(pass, scores, highest); break;
      case kQuiet: score_all<M, kQuiet>(pass, scores, highest); break;
    }
    weigh<M>(scores, weights, highest, pass, decay);
    constexpr int kFirst = M > kHalf ? kHalf : M;
    const Source source = pass.source == kCache && M > kFirst ? kPacking : pass.source;
    gather<kFirst>(pass, source, weights, 0, decay);
    if constexpr (M > kFirst)
      gather<M - kFirst>(pass, pass.source == kQuiet ? kQuiet : kPacked, weights + kFirst * kTile, kFirst, decay + kFirst);
  }

  // The functions with the products are not inlined and hold what they use in variables of their own:
  // everything that a product needs has to stay in a register.
  template <int M, Source kSource>
  __attribute__((noinline)) void score_all(const Pass& pass, float* scores, Vector* highest) {
    Prefetch* const prefetch = pass.prefetch;
    for (int token = 0; token < pass.tile.tokens; token += kChunk)
      score<M, kSource>(pass, token, scores + token, highest, prefetch);
  }

  template <int M, Source kSource>
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
      Lines lines{}, more{};
      if (kSource != kQuiet) {
        lines = prefetch->take(32);
        more = pass.twice ? prefetch->take(32) : lines;
      }
      for (int step = start; step < end; step += kSide) {
        UNROLL for (int s = 0; s < kSide; s++) {
          Operand low, high;
          if (kSource == kPacked || kSource == kQuiet) {
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
          if (kSource != kQuiet) {
            Prefetch::ask(lines);
            Prefetch::ask(more);
          }
          UNROLL for (int m = 0; m < M; m++) {
            const Operand query = F::spread(queries + m * kQueryStride);
            sums[s][m][0] = F::dot(sums[s][m][0], query, low);
            sums[s][m][1] = F::dot(sums[s][m][1], query, high);
          }
          queries += F::kStep;
        }
      }
    }
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

  template <int M>
  INLINE void weigh(const float* scores, Weight* weights, const Vector* highest, const Pass& pass,
                    float* decay) {
    alignas(64) float lowered[F::kWidth] = {};
    UNROLL for (int m = 0; m < M; m++) {
      const float before = pass.to.maxima[m];
      const float after = std::max(before, F::highest(highest[m]) * factor_);
      lowered[m] = before - after;
      pass.to.maxima[m] = after;
    }
    F::store(lowered, exp2_of<F>(F::load(lowered)));
    const Vector factor = F::set(factor_);
    UNROLL for (int m = 0; m < M; m++) {
      const Vector maximum = F::set(pass.to.maxima[m]);
      Vector first = F::set(0.f), second = first;
      for (int i = 0; i < pass.tile.tokens; i += kChunk) {
        const float* at = scores + m * kTile + i;
        const Vector low = exp2_of<F>(F::less(F::load(at), factor, maximum));
        const Vector high = exp2_of<F>(F::less(F::load(at + F::kWidth), factor, maximum));
        first = F::add(first, low);
        second = F::add(second, high);
        F::weights(weights + m * kTile + i, low, high);
      }
      decay[m] = lowered[m];
      pass.to.sums[m] = pass.to.sums[m] * decay[m] + F::sum(F::add(first, second));
    }
  }

  template <int M>
  void gather(const Pass& pass, Source source, const Weight* weights, int first, const float* decay) {
    switch (source) {
      case kPacked: return gather_all<M, kPacked>(pass, weights, first, decay);
      case kPacking: return gather_all<M, kPacking>(pass, weights, first, decay);
      case kCache: return gather_all<M, kCache>(pass, weights, first, decay);
      case kQuiet: return gather_all<M, kQuiet>(pass, weights, first, decay);
    }
  }

  template <int M, Source kSource>
  void gather_all(const Pass& pass, const Weight* weights, int first, const float* decay) {
    constexpr int kWide = F::kColumns * F::kWidth, kNarrow = 2 * F::kWidth;
    int column = 0;
    for (; column + kWide <= size_; column += kWide)
      gather_columns<M, F::kColumns, kSource>(pass, weights, first, decay, column);
    if constexpr (kWide > kNarrow)
      for (; column < size_; column += kNarrow)
        gather_columns<M, 2, kSource>(pass, weights, first, decay, column);
  }

  template <int M, int C>
  static INLINE void product(Vector (&sums)[M][C], const Operand* values, const Weight* weights) {
    UNROLL for (int m = 0; m < M; m++) {
      const Operand weight = F::spread(weights + m * kTile);
      UNROLL for (int c = 0; c < C; c++) sums[m][c] = F::dot(sums[m][c], weight, values[c]);
    }
  }

  template <int M, int C, Source kSource>
  __attribute__((noinline)) void gather_columns(const Pass& pass, const Weight* weights, int first,
                                                const float* decay, int column) {
    const Tile<Element>& tile = pass.tile;
    Prefetch* const prefetch = pass.prefetch;
    const int size = size_;
    const Element* zeros = zeros_;
    float* outputs = pass.to.outputs + first * size + column;
    Operand* packed = reinterpret_cast<Operand*>(values_ + int64_t(column) * kTile * sizeof(Weight));
    Vector sums[M][C];
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int c = 0; c < C; c++)
        sums[m][c] = F::mul(F::set(decay[m]), F::load(outputs + m * size + c * F::kWidth));
    constexpr int kSteps = kSub / F::kStep;
    for (int start = 0; start < tile.tokens; start += 2 * kSub) {
      Lines lines{}, more{};
      if (kSource != kQuiet) {
        lines = prefetch->take(2 * kSteps);
        more = pass.twice ? prefetch->take(2 * kSteps) : lines;
      }
      const int end = std::min(start + 2 * kSub, tile.tokens);
      if (kSource == kPacked || kSource == kQuiet) {
        for (int step = start / F::kStep; step < end / F::kStep; step++) {
          Operand values[C];
          UNROLL for (int c = 0; c < C; c++) values[c] = F::get(packed + c);
          product<M, C>(sums, values, weights);
          packed += C;
          weights += F::kStep;
          if (kSource != kQuiet) {
            Prefetch::ask(lines);
            Prefetch::ask(more);
          }
        }
        continue;
      }
      for (int sub = start; sub < end; sub += kSub) {
        const Element* from = tile.values[sub / kSub] + column;
        const int low = tile.low - sub, high = tile.high - sub;
        // Memory outside of the run may hold anything, and nothing times that is not nothing.
        const auto row = [=](int token) {
          return token >= low && token < high ? from + token * size : zeros;
        };
        for (int step = 0; step < kSteps; step++) {
          Prefetch::ask(lines);
          Prefetch::ask(more);
          const int token = F::token_of(step);
          if (kSource == kPacking || token < high) {
            Operand values[C];
            F::template values<C>(row(token), row(token + F::kStep - 1), values);
            if (kSource == kPacking) UNROLL for (int c = 0; c < C; c++) F::put(packed + c, values[c]);
            product<M, C>(sums, values, weights);
          }
          packed += C;
          weights += F::kStep;
        }
      }
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
