// Scores and unnormalized softmax weights of the tokens for each query, relative to its base.
#pragma once
#include <algorithm>
#include <cmath>

#include "register_pass.h"

namespace {

// A base is kHeadroom, in powers of 2, above the highest score seen when it was chosen, and
// initially kHeadroom above 0. That costs no floating-point precision. Accumulators are rescaled
// only if a score exceeds the base, or if the sum over the first tile is below kMinSum.
constexpr float kHeadroom = 16, kMinSum = 1 / 4294967296.f;

template <class F>
class Softmax {
  using Element = typename F::Element;
  using Weight = typename F::Weight;
  using Vector = typename F::Vector;
  using Operand = typename F::Operand;
  static constexpr int kChunk = 2 * F::kWidth;  // tokens of a pair of vectors

 public:
  Softmax(int size, int block_size, float factor, char* packed)
      : steps_(size / F::kStep), block_size_(block_size), factor_(factor),
        packed_(reinterpret_cast<Operand*>(packed)) {}

  // Writes the weights of the tile's tokens, and the factors by which to scale the outputs so far.
  // kPrefetchLines lines of the next tile are prefetched in every two steps.
  template <int M, Source kSource, int kPrefetchLines>
  void run(const Pass<F>& pass, Weight* weights, float* output_scales) {
    alignas(64) float sums[M * F::kWidth];
    float* const bases = pass.to.bases;
    UNROLL for (int m = 0; m < M; m++) output_scales[m] = 1;
    const bool first = std::find(bases, bases + M, kNoScores) != bases + M;
    if (first) std::replace(bases, bases + M, kNoScores, kHeadroom);
    const bool above = exp_scores<M, kSource, kPrefetchLines>(pass, weights, sums);
    if (above || (first && are_below<M>(sums))) {
      constexpr Source kAgain = kSource == kPacking ? kPacked : kSource;
      rescale<M, kAgain>(pass, output_scales);
      exp_scores<M, kAgain, 0>(pass, weights, sums);
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
    for (int m = 0; m < M; m++) below |= F::sum(F::load(sums + m * F::kWidth)) < kMinSum;
    return below;
  }

  // Returns whether any score is above its base. Functions with products are not inlined and copy
  // their inputs to local variables, so that the compiler holds all of them in registers.
  template <int M, Source kSource, int kPrefetchLines>
  __attribute__((noinline)) bool exp_scores(const Pass<F>& pass, Weight* weights, float* sums) {
    const Vector scale = F::set(F::exponent_scale(factor_));
    float offsets[M];
    UNROLL for (int m = 0; m < M; m++) offsets[m] = F::exponent_offset(pass.to.bases[m]);
    UNROLL for (int m = 0; m < M; m++) F::store(sums + m * F::kWidth, F::set(0.f));
    typename F::RunningMax highest = F::initial_max();
    for (int token = 0; token < pass.tile.tokens; token += kChunk) {
      Vector scores[M][2];
      score<M, kSource, kPrefetchLines>(pass, token, scores);
      UNROLL for (int m = 0; m < M; m++)
        F::exp_weights(scores[m], scale, F::set(offsets[m]), sums + m * F::kWidth,
                       weights + m * kTile + token, highest);
    }
    return F::exceeds_base(highest);
  }

  template <int M, Source kSource, int kPrefetchLines>
  INLINE void score(const Pass<F>& pass, int token, Vector (&scores)[M][2]) {
    // With few queries, several accumulators hide the latency of dependent products.
    constexpr int kSide = M <= 2 ? 2 : 1;
    const int steps = steps_, stride = block_size_;
    const Weight* queries = pass.to.queries;
    const Element* from = pass.tile.keys[token / kSubTile] + token % kSubTile;
    Operand* packed = packed_ + int64_t(token / kChunk) * steps * 2;
    Lines lines[kPrefetchLines + 1];
    UNROLL for (int i = 0; i < kPrefetchLines; i++) lines[i] = pass.prefetch->take(steps / 2);
    Vector sums[kSide][M][2];
    UNROLL for (int s = 0; s < kSide; s++)
      UNROLL for (int m = 0; m < M; m++) sums[s][m][0] = sums[s][m][1] = F::set(0.f);
    for (int step = 0; step < steps; step += 2) {
      UNROLL for (int i = 0; i < kPrefetchLines; i++) Prefetch::issue(lines[i]);
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
          const Operand query = F::broadcast(queries + m * kQueryStride);
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
    mask_invisible<M>(pass, token, scores);
  }

  template <int M>
  INLINE void mask_invisible(const Pass<F>& pass, int token, Vector (&scores)[M][2]) const {
    const Tile<Element>& tile = pass.tile;
    const bool whole = tile.low <= token && token + kChunk <= tile.high && !tile.causal_heads;
    if (whole) return;
    UNROLL for (int m = 0; m < M; m++) {
      const int end = std::min(tile.high, tile.visible_end(pass.query + m)) - token;
      UNROLL for (int i = 0; i < 2; i++)
        scores[m][i] = F::mask_outside(scores[m][i], i, tile.low - token, end);
    }
  }

  // Sets the bases from the highest scores of this tile, and output_scales the sums.
  template <int M, Source kSource>
  __attribute__((noinline)) void rescale(const Pass<F>& pass, float* output_scales) {
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
      const float before = F::sum(F::load(sums)) >= kMinSum ? base : kNoScores;
      const float here = *std::max_element(highest[m], highest[m] + F::kWidth) * factor_;
      base = here <= before ? before : here + kHeadroom;  // NaN if the query has NaN
      output_scales[m] = std::exp2(before - base);
      F::store(sums, F::mul(F::load(sums), F::set(output_scales[m])));
    }
  }

  const int steps_, block_size_;
  const float factor_;
  Operand* const packed_;
};

}  // namespace
