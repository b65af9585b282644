// Peak multiply-add and memory read throughput of one thread: upper bounds of any kernel.
#include <immintrin.h>

#include <chrono>

#ifdef __AVX512BF16__
using Vector = __m512;
constexpr int kFlops = 64;
static inline Vector set(float x) { return _mm512_set1_ps(x); }
static inline Vector add(Vector x, Vector y) { return _mm512_add_ps(x, y); }
static inline Vector load(const float* at) { return _mm512_loadu_ps(at); }
static inline Vector step(Vector sum) {
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  return _mm512_dpbf16_ps(sum, one, one);
}
#else
using Vector = __m256;
constexpr int kFlops = 16;
static inline Vector set(float x) { return _mm256_set1_ps(x); }
static inline Vector add(Vector x, Vector y) { return _mm256_add_ps(x, y); }
static inline Vector load(const float* at) { return _mm256_loadu_ps(at); }
static inline Vector step(Vector sum) { return _mm256_fmadd_ps(set(1), set(1), sum); }
#endif

namespace {

// Enough independent sums to hide the latency of a multiply-add.
constexpr int kSums = 12;

class Seconds {
 public:
  double passed() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  }

 private:
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

// Marks the sums as used, so that the compiler does not remove them.
void use(Vector (&sums)[kSums]) {
  for (Vector& sum : sums) asm volatile("" : : "x"(sum));
}

}  // namespace

extern "C" double flops_per_second(int steps) {
  // Different initial values, so that the compiler does not merge the sums.
  Vector sums[kSums];
  for (int i = 0; i < kSums; i++) sums[i] = set(i);
  const Seconds seconds;
  for (int n = 0; n < steps; n++) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i++) sums[i] = step(sums[i]);
  }
  use(sums);
  return double(steps) * kSums * kFlops / seconds.passed();
}

// Prefetch one page ahead, since the hardware prefetcher stops at page boundaries.
extern "C" double bytes_per_second(const float* from, long floats) {
  constexpr int kWidth = sizeof(Vector) / sizeof(float), kLine = 16, kAhead = 1024;
  Vector sums[kSums];
  for (int i = 0; i < kSums; i++) sums[i] = set(i);
  const Seconds seconds;
  for (long at = 0; at + kSums * kLine <= floats; at += kSums * kLine) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i++) {
      __builtin_prefetch(from + at + i * kLine + kAhead, 0, 2);
      for (int part = 0; part < kLine; part += kWidth)
        sums[i] = add(sums[i], load(from + at + i * kLine + part));
    }
  }
  use(sums);
  return sizeof(float) * double(floats) / seconds.passed();
}
