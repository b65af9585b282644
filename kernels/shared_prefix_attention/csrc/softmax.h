// Scores and unnormalized softmax weights of the tokens for each query, relative to its base.
#pragma once
#include <algorithm>
#include <cmath>

#include "pass.h"

namespace {

// A base is kSlack, in powers of 2, above the highest score seen when it was chosen, and initially
// kSlack above 0. That costs no floating-point precision. Accumulators are rescaled only if a score
// exceeds the base, or if the sum over the first tile is below kLeastSum.
constexpr float kSlack = 16, kLeastSum = 1 / 4294967296.f;

template <class F>
class Weigh {
  using Element = typename F::Element;
  using Weight = typename F::Weight;
  using Vector = typename F::Vector;
  using Operand = typename F::Operand;
  static constexpr int kChunk = 2 * F::kWidth;  // tokens of a pair of vectors

 public:
  Weigh(int size, int block_size, float factor, char* packed)
      : steps_(size / F::kStep), block_size_(block_size), factor_(factor),
        packed_(reinterpret_cast<Operand*>(packed)) {}

  // Writes the weights of the tile's tokens, and the factors by which to scale the outputs so far.
  // kAsked lines of the next tile are prefetched in every two steps.
  template <int M, Source kSource, int kAsked>
  void run(const Pass<F>& pass, Weight* weights, float* decay) {
    alignas(64) float sums[M * F::kWidth];
    float* const bases = pass.to.bases;
    UNROLL for (int m = 0; m < M; m++) decay[m] = 1;
    const bool first = std::find(bases, bases + M, kNothing) != bases + M;
    if (first) std::replace(bases, bases + M, kNothing, kSlack);
    const bool above = weigh_all<M, kSource, kAsked>(pass, weights, sums);
    if (above || (first && are_below<M>(sums))) {
      constexpr Source kAgain = kSource == kPacking ? kPacked : kSource;
      rebase<M, kAgain>(pass, decay);
      weigh_all<M, kAgain, 0>(pass, weights, sums);
    }
    UNROLL for (int m = 0; m < M; m++) {
      float* const to = pass.to.sums + m * F::kWidth;
      F::store(to, F::add(F::load(to), F::load(sums + m * F::kWidth)));
    }
  }

 private:
  template <int M>
  static bool are_below(const float* sums) {
    bool below = false;
    for (int m = 0; m < M; m++) below |= F::sum(F::load(sums + m * F::kWidth)) < kLeastSum;
    return below;
  }

  // Returns whether any score is above its base. Functions with products are not inlined and copy
  // their inputs to local variables, so that the compiler holds all of them in registers.
  template <int M, Source kSource, int kAsked>
  __attribute__((noinline)) bool weigh_all(const Pass<F>& pass, Weight* weights, float* sums) {
    const Vector unit = F::set(F::unit(factor_));
    float tops[M];
    UNROLL for (int m = 0; m < M; m++) tops[m] = F::top(pass.to.bases[m]);
    UNROLL for (int m = 0; m < M; m++) F::store(sums + m * F::kWidth, F::set(0.f));
    typename F::Highest highest = F::lowest();
    for (int token = 0; token < pass.tile.tokens; token += kChunk) {
      Vector scores[M][2];
      score<M, kSource, kAsked>(pass, token, scores);
      UNROLL for (int m = 0; m < M; m++)
        F::weigh(scores[m], unit, F::set(tops[m]), sums + m * F::kWidth, weights + m * kTile + token,
                 highest);
    }
    return F::is_above(highest);
  }

  template <int M, Source kSource, int kAsked>
  INLINE void score(const Pass<F>& pass, int token, Vector (&scores)[M][2]) {
    // With few queries, several accumulators hide the latency of dependent products.
    constexpr int kSide = M <= 2 ? 2 : 1;
    const int steps = steps_, stride = block_size_;
    const Weight* queries = pass.to.queries;
    const Element* from = pass.tile.keys[token / kSub] + token % kSub;
    Operand* packed = packed_ + int64_t(token / kChunk) * steps * 2;
    Lines lines[kAsked + 1];
    UNROLL for (int i = 0; i < kAsked; i++) lines[i] = pass.prefetch->take(steps / 2);
    Vector sums[kSide][M][2];
    UNROLL for (int s = 0; s < kSide; s++)
      UNROLL for (int m = 0; m < M; m++) sums[s][m][0] = sums[s][m][1] = F::set(0.f);
    for (int step = 0; step < steps; step += 2) {
      UNROLL for (int i = 0; i < kAsked; i++) Prefetch::ask(lines[i]);
      UNROLL for (int one = 0; one < 2; one++) {
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
        UNROLL for (int m = 0; m < M; m++) {
          const Operand query = F::spread(queries + m * kQueryStride);
          Vector(&sum)[2] = sums[one % kSide][m];
          sum[0] = F::dot(sum[0], query, low);
          sum[1] = F::dot(sum[1], query, high);
        }
        queries += F::kStep;
      }
    }
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int i = 0; i < 2; i++)
        scores[m][i] = kSide == 2 ? F::add(sums[0][m][i], sums[kSide - 1][m][i]) : sums[0][m][i];
    leave_out_unseen<M>(pass, token, scores);
  }

  template <int M>
  INLINE void leave_out_unseen(const Pass<F>& pass, int token, Vector (&scores)[M][2]) const {
    const Tile<Element>& tile = pass.tile;
    const bool whole = tile.low <= token && token + kChunk <= tile.high && !tile.causal_heads;
    if (whole) return;
    UNROLL for (int m = 0; m < M; m++) {
      const int end = std::min(tile.high, tile.seen_by(pass.query + m)) - token;
      UNROLL for (int i = 0; i < 2; i++) scores[m][i] = F::within(scores[m][i], i, tile.low - token, end);
    }
  }

  // Sets the bases from the highest scores of this tile, and rescales the sums.
  template <int M, Source kSource>
  __attribute__((noinline)) void rebase(const Pass<F>& pass, float* decay) {
    alignas(64) float highest[M][F::kWidth];
    for (int m = 0; m < M; m++) F::store(highest[m], F::set(-INFINITY));
    for (int token = 0; token < pass.tile.tokens; token += kChunk) {
      Vector scores[M][2];
      score<M, kSource, 0>(pass, token, scores);
      UNROLL for (int m = 0; m < M; m++)
        F::store(highest[m], F::max(F::load(highest[m]), F::max(scores[m][0], scores[m][1])));
    }
    for (int m = 0; m < M; m++) {
      float* const sums = pass.to.sums + m * F::kWidth;
      float& base = pass.to.bases[m];
      const float before = F::sum(F::load(sums)) >= kLeastSum ? base : kNothing;
      const float here = *std::max_element(highest[m], highest[m] + F::kWidth) * factor_;
      base = here <= before ? before : here + kSlack;  // NaN if the query has NaN
      decay[m] = std::exp2(before - base);
      F::store(sums, F::mul(F::load(sums), F::set(decay[m])));
    }
  }

  const int steps_, block_size_;
  const float factor_;
  Operand* const packed_;
};

}  // namespace
