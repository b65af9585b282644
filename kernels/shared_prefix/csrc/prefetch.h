// Cache lines of the tile after this one, asked for one by one between the products of this one: the
// processor's own prefetcher stops at every page.
#pragma once
#include <algorithm>
#include <cstdint>

namespace {

struct Lines {
  const char* at;
  int64_t stride;
  int count;
};

class Prefetch {
 public:
  static constexpr int kLine = 64;

  void add(const void* at, int64_t stride, int64_t count) {
    if (count > 0) lists_[num_++] = {static_cast<const char*>(at), stride, int(count)};
  }

  Lines take(int most) {
    if (i_ == num_) return {nullptr, 0, 0};
    Lines& list = lists_[i_];
    const Lines taken{list.at, list.stride, std::min(most, list.count)};
    list.at += taken.count * list.stride;
    list.count -= taken.count;
    if (list.count == 0) i_++;
    return taken;
  }

  void ask_for_the_rest() {
    for (Lines lines = take(1 << 30); lines.count; lines = take(1 << 30))
      for (int i = 0; i < lines.count; i++) ask(lines, i);
  }

  // Into the second level: into the first one, it would push out what is being multiplied.
  static inline __attribute__((always_inline)) void ask(const Lines& lines, int i) {
    if (i < lines.count) __builtin_prefetch(lines.at + i * lines.stride, 0, 2);
  }

 private:
  Lines lists_[16];
  int i_ = 0, num_ = 0;
};

}  // namespace
