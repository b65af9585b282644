// What a thread multiplies and adds from registers alone: the ceiling of any kernel.
#include <immintrin.h>

#include <chrono>

#ifdef __AVX512BF16__
using Vector = __m512;
constexpr int kFlops = 64;
static inline Vector zero() { return _mm512_setzero_ps(); }
static inline Vector step(Vector sum) {
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  return _mm512_dpbf16_ps(sum, one, one);
}
#else
using Vector = __m256;
constexpr int kFlops = 16;
static inline Vector zero() { return _mm256_setzero_ps(); }
static inline Vector step(Vector sum) { return _mm256_fmadd_ps(sum, _mm256_set1_ps(1), sum); }
#endif

// Enough sums side by side that none waits for its last step.
constexpr int kSums = 12;

extern "C" double flops_per_second(int steps) {
  Vector sums[kSums];
  for (Vector& sum : sums) sum = zero();
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; i++) {
#pragma GCC unroll 16
    for (Vector& sum : sums) {
      sum = step(sum);
      asm volatile("" : "+v"(sum));
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
  return double(steps) * kSums * kFlops / seconds.count();
}
