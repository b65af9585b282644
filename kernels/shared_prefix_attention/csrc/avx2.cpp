// Variant for AVX2 and FMA. bfloat16 is converted to float when it is packed.
#include <immintrin.h>

#include <cstring>

#include "float_math.h"
#include "entry_points.h"
#include "worker.h"

namespace {

struct Avx2 {
  using Vector = __m256;
  static constexpr int kWidth = 8, kMaxRows = 4, kColumns = 2;

  static INLINE Vector set(float x) { return _mm256_set1_ps(x); }
  static INLINE Vector load(const float* from) { return _mm256_loadu_ps(from); }
  static INLINE void store(float* to, Vector x) { _mm256_storeu_ps(to, x); }
  static INLINE Vector add(Vector x, Vector y) { return _mm256_add_ps(x, y); }
  static INLINE Vector sub(Vector x, Vector y) { return _mm256_sub_ps(x, y); }
  static INLINE Vector mul(Vector x, Vector y) { return _mm256_mul_ps(x, y); }
  static INLINE Vector max(Vector x, Vector y) { return _mm256_max_ps(x, y); }
  static INLINE Vector fma(Vector x, Vector y, Vector z) { return _mm256_fmadd_ps(x, y, z); }
  static INLINE float sum(Vector x) {
    alignas(32) float all[kWidth];
    store(all, x);
    return ((all[0] + all[4]) + (all[1] + all[5])) + ((all[2] + all[6]) + (all[3] + all[7]));
  }
  // 2^x by an exponent shift and a polynomial; error at most 1e-7, exactly 1 at 0.
  static INLINE Vector exp2(Vector x) {
    const Vector magic = set(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    x = max(x, set(-126.f));
    const Vector whole = add(x, magic), part = sub(x, sub(whole, magic));
    Vector p = fma(part, set(1.3264727e-3f), set(9.671513e-3f));
    p = fma(p, part, set(5.5507336e-2f));
    p = fma(p, part, set(2.4022242e-1f));
    p = fma(p, part, set(6.931470e-1f));
    p = fma(p, part, set(1.f));
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(whole), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  }
  static INLINE Vector mask_outside(Vector x, int half, int low, int high) {
    const __m256i tokens = _mm256_add_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0),
                                            _mm256_set1_epi32(half * kWidth));
    const __m256i mask = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), tokens),
                                             _mm256_cmpgt_epi32(_mm256_set1_epi32(high), tokens));
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(mask));
  }
  static INLINE bool any_positive(Vector x) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x, set(0), _CMP_GT_OQ));
  }
};

struct Float32 : Floats<Avx2> {
  using Element = float;

  static INLINE void keys(const Element* from, int, Operand& low, Operand& high) {
    low = load(from);
    high = load(from + kWidth);
  }
  template <int C>
  static INLINE void values(const Element* from, const Element*, Operand* to) {
    UNROLL for (int c = 0; c < C; c++) to[c] = load(from + kWidth * c);
  }
  static void queries(const Element* from, Weight* to, int count) { std::copy_n(from, count, to); }
  static void outputs(const float* from, float factor, Element* to, int size) {
    for (int d = 0; d < size; d++) to[d] = from[d] * factor;
  }
};

struct Bfloat16 : Floats<Avx2> {
  using Element = uint16_t;

  static INLINE Vector to_float(const Element* from) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
  static INLINE void keys(const Element* from, int, Operand& low, Operand& high) {
    low = to_float(from);
    high = to_float(from + kWidth);
  }
  template <int C>
  static INLINE void values(const Element* from, const Element*, Operand* to) {
    UNROLL for (int c = 0; c < C; c++) to[c] = to_float(from + kWidth * c);
  }
  static void queries(const Element* from, Weight* to, int count) {
    for (int i = 0; i < count; i += kWidth) store(to + i, to_float(from + i));
  }
  static void outputs(const float* from, float factor, Element* to, int size) {
    for (int d = 0; d < size; d++) to[d] = to_bfloat16(from[d] * factor);
  }
  // Round to nearest, ties to even.
  static Element to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return Element((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

}  // namespace

void run_avx2(SharedState& shared) {
  if (shared.call.element == kBfloat16)
    Worker<Bfloat16>(shared).run();
  else
    Worker<Float32>(shared).run();
}
