// C interface of the library, called by cpu.py. Compiled for baseline x86-64, because it runs
// before the CPU features are checked.
#include <sched.h>

#include <cstdlib>
#include <memory>

#include "entry_points.h"
#include "worker.h"

namespace {

// Growing buffer, freed when its thread ends.
class Memory {
 public:
  ~Memory() { std::free(at_); }
  char* at_least(size_t bytes) {
    if (bytes > bytes_) {
      std::free(at_);
      bytes_ = (bytes + 4095) / 4096 * 4096;
      at_ = static_cast<char*>(std::aligned_alloc(4096, bytes_));
      if (!at_) std::abort();
    }
    return at_;
  }

 private:
  char* at_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace

char* thread_buffer(size_t bytes) {
  static thread_local Memory memory;
  return memory.at_least(bytes);
}

void back_off(int times) {
  // With more threads than cores, the awaited thread may need this thread's core.
  if (times < 1000)
    __builtin_ia32_pause();
  else
    sched_yield();
}

// The exported symbols.
#pragma GCC visibility push(default)
extern "C" {

int coppice_shared_prefix_version() { return 2; }

// Best instruction set that the CPU and the operating system support; 0 if none is sufficient.
int coppice_shared_prefix_isa() {
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi"))
    return kAvx512Bfloat16;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kAvx2 : 0;
}

void coppice_shared_prefix_decode(const Call* call) {
  static thread_local Schedule schedule;
  static thread_local Memory memory;
  schedule.build(*call);
  const int num_units = schedule.num_units(*call);
  const size_t floats = (schedule.num_partials * sizeof(float) + 63) / 64 * 64;
  char* partials = memory.at_least(floats + num_units);
  auto* done = reinterpret_cast<std::atomic<char>*>(partials + floats);
  for (int i = 0; i < num_units; i++) done[i].store(0, std::memory_order_relaxed);
  SharedState shared{*call, schedule, reinterpret_cast<float*>(partials), {0}, done};
  const auto run = call->isa == kAvx512Bfloat16 ? run_avx512 : run_avx2;
#pragma omp parallel num_threads(call->num_threads)
  run(shared);
}

}  // extern "C"
#pragma GCC visibility pop
