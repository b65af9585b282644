// Variant for AVX-512 with AVX512_BF16 dot products.
#include <immintrin.h>

#include <cstring>

#include "float_math.h"
#include "entry_points.h"
#include "worker.h"

namespace {

struct Avx512 {
  using Vector = __m512;
  static constexpr int kWidth = 16, kMaxRows = 8, kColumns = 4;

  static INLINE Vector set(float x) { return _mm512_set1_ps(x); }
  static INLINE Vector load(const float* from) { return _mm512_loadu_ps(from); }
  static INLINE void store(float* to, Vector x) { _mm512_storeu_ps(to, x); }
  static INLINE Vector add(Vector x, Vector y) { return _mm512_add_ps(x, y); }
  static INLINE Vector mul(Vector x, Vector y) { return _mm512_mul_ps(x, y); }
  static INLINE Vector max(Vector x, Vector y) { return _mm512_max_ps(x, y); }
  static INLINE Vector fma(Vector x, Vector y, Vector z) { return _mm512_fmadd_ps(x, y, z); }
  static INLINE float sum(Vector x) { return _mm512_reduce_add_ps(x); }
  // 2^x by a polynomial of the fractional part x - floor(x); error at most 3e-7.
  static INLINE Vector exp2(Vector x) {
    const Vector part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    Vector p = fma(part, set(1.8775767e-3f), set(8.9893397e-3f));
    p = fma(p, part, set(5.5826318e-2f));
    p = fma(p, part, set(2.4015361e-1f));
    p = fma(p, part, set(6.9315308e-1f));
    p = fma(p, part, set(1.f));
    return _mm512_scalef_ps(p, x);
  }
  static INLINE bool any_positive(Vector x) { return _mm512_cmp_ps_mask(x, set(0), _CMP_GT_OQ); }
  static INLINE Vector masked(Vector x, __m512i tokens, int low, int high) {
    const __mmask16 mask = _mm512_cmpge_epi32_mask(tokens, _mm512_set1_epi32(low)) &
                           _mm512_cmplt_epi32_mask(tokens, _mm512_set1_epi32(high));
    return _mm512_mask_blend_ps(mask, _mm512_set1_ps(-INFINITY), x);
  }
};

// Correction table for 2^x in bfloat16. Read as an integer, the bits of a bfloat16 are a piecewise
// linear approximation of a scaled and biased log2. So 2^x is the linear value minus a correction,
// which is tabulated at the 128 values of the mantissa, in quarters of a ulp.
struct Exp2Corrections {
  alignas(64) uint8_t at[128];

  constexpr Exp2Corrections() : at() {
    double power = 1;
    for (int place = 0; place < 128; place++, power *= 1.0054299011128029)  // 2^(1 / 128)
      at[place] = uint8_t(4 * place - 512 * (power - 1) + .5);
  }
};
constexpr Exp2Corrections kExp2Corrections;

// An operand has 16 pairs of neighbours along the summed dimension. Interleaving two rows of 32
// permutes the pairs to [0-3 8-11 16-19 24-27] and [4-7 12-15 20-23 28-31]. Narrowing two vectors
// of weights to one restores the order of tokens; `outputs` restores the order of dimensions.
struct Bfloat16 : Avx512 {
  using Element = uint16_t;
  using Weight = uint16_t;
  using Operand = __m512i;
  static constexpr int kStep = 2;

  static INLINE Operand get(const Operand* from) { return _mm512_load_si512(from); }
  static INLINE void put(Operand* to, Operand x) { _mm512_store_si512(to, x); }
  static INLINE Operand broadcast(const Weight* from) {
    int pair;
    memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static INLINE Vector dot(Vector sum, Operand x, Operand y) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
  }
  static INLINE void interleave(const Element* one, const Element* other, Operand& low, Operand& high) {
    const __m512i x = _mm512_loadu_si512(one), y = _mm512_loadu_si512(other);
    low = _mm512_unpacklo_epi16(x, y);
    high = _mm512_unpackhi_epi16(x, y);
  }
  static INLINE void keys(const Element* from, int stride, Operand& low, Operand& high) {
    interleave(from, from + stride, low, high);
  }
  template <int C>
  static INLINE void values(const Element* one, const Element* other, Operand* to) {
    UNROLL for (int c = 0; c < C; c += 2) interleave(one + 16 * c, other + 16 * c, to[c], to[c + 1]);
  }
  static INLINE Vector mask_outside(Vector x, int half, int low, int high) {
    const __m512i tokens = _mm512_set_epi32(27, 26, 25, 24, 19, 18, 17, 16, 11, 10, 9, 8, 3, 2, 1, 0);
    return masked(x, tokens, low - 4 * half, high - 4 * half);
  }
  // Exponents are in quarters of a bfloat16 ulp, 512 per power of two, with bfloat16's bias of 127.
  static constexpr int kOne = 127 * 512;
  static float exponent_scale(float factor) { return factor * 512; }
  static float exponent_offset(float base) { return kOne + 1.5f - base * 512; }
  using RunningMax = __m512i;
  static INLINE RunningMax initial_max() { return _mm512_setzero_si512(); }
  static INLINE bool exceeds_base(RunningMax x) {
    return _mm512_cmpgt_epu16_mask(x, _mm512_set1_epi16(short(kOne + 2)));
  }
  // Outputs are divided by the sum of the rounded weights, so the weights used add up to one.
  static INLINE void exp_weights(const Vector (&scores)[2], Vector scale, Vector offset, float* sum,
                                 Weight* to, RunningMax& highest) {
    // packus saturates negative values to zero: weights that are too small become 0.
    const __m512i line = _mm512_packus_epi32(_mm512_cvtps_epi32(fma(scores[0], scale, offset)),
                                             _mm512_cvtps_epi32(fma(scores[1], scale, offset)));
    const __m512i* const corrections = reinterpret_cast<const __m512i*>(kExp2Corrections.at);
    const __m512i place = _mm512_srli_epi16(line, 2);
    const __m512i correction =
        _mm512_maskz_permutex2var_epi8(0x5555555555555555, _mm512_load_si512(corrections), place,
                                       _mm512_load_si512(corrections + 1));
    const __m512i weights = _mm512_srli_epi16(_mm512_sub_epi16(line, correction), 2);
    highest = _mm512_max_epu16(highest, line);
    _mm512_storeu_si512(to, weights);
    const __m512i one = _mm512_set1_epi16(0x3f80);
    store(sum, dot(load(sum), weights, one));
  }
  static void queries(const Element* from, Weight* to, int count) { std::copy_n(from, count, to); }
  static void outputs(const float* from, float factor, Element* to, int size) {
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second =
        _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    for (int d = 0; d < size; d += 32) {
      const Vector low = mul(set(factor), load(from + d)), high = mul(set(factor), load(from + d + 16));
      const Vector one = _mm512_permutex2var_ps(low, first, high);
      const Vector other = _mm512_permutex2var_ps(low, second, high);
      _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(other, one));
    }
  }
};

struct Float32 : Floats<Avx512> {
  using Element = float;

  static INLINE void keys(const Element* from, int, Operand& low, Operand& high) {
    low = load(from);
    high = load(from + 16);
  }
  template <int C>
  static INLINE void values(const Element* from, const Element*, Operand* to) {
    UNROLL for (int c = 0; c < C; c++) to[c] = load(from + 16 * c);
  }
  static INLINE Vector mask_outside(Vector x, int half, int low, int high) {
    const __m512i tokens = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return masked(x, tokens, low - 16 * half, high - 16 * half);
  }
  static void queries(const Element* from, Weight* to, int count) { std::copy_n(from, count, to); }
  static void outputs(const float* from, float factor, Element* to, int size) {
    for (int d = 0; d < size; d++) to[d] = from[d] * factor;
  }
};

}  // namespace

void run_avx512(SharedState& shared) {
  if (shared.call.element == kBfloat16)
    Worker<Bfloat16>(shared).run();
  else
    Worker<Float32>(shared).run();
}
