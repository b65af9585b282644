// Software prefetch of the next tile, interleaved line by line with the products of this one: the
// hardware prefetcher stops at page boundaries.
#pragma once
#include <algorithm>
#include <cstdint>

namespace {

struct Lines {
  const char* at;
  int64_t stride;
};

class Prefetch {
 public:
  static constexpr int kLine = 64;

  void add(const void* at, int64_t stride, int64_t count) {
    if (count > 0) lists_[num_++] = {static_cast<const char*>(at), stride, int(count)};
  }

  // Takes up to `most` lines with a constant stride. Callers may prefetch more lines than were
  // taken, at little cost. If none are left, the stride is zero, so that callers need no branch.
  Lines take(int most) {
    if (i_ == num_ || most == 0) return {reinterpret_cast<const char*>(this), 0};
    List& list = lists_[i_];
    const Lines taken{list.at, list.stride};
    const int count = std::min(most, list.count);
    list.at += count * list.stride;
    list.count -= count;
    if (list.count == 0) i_++;
    return taken;
  }

  // Into L2: in L1 it would evict the operands in use.
  static inline __attribute__((always_inline)) void issue(Lines& lines) {
    __builtin_prefetch(lines.at, 0, 2);
    lines.at += lines.stride;
  }

  void issue_rest() {
    for (; i_ < num_; i_++) {
      Lines lines{lists_[i_].at, lists_[i_].stride};
      for (int i = 0; i < lists_[i_].count; i++) issue(lines);
    }
  }

 private:
  struct List {
    const char* at;
    int64_t stride;
    int count;
  };

  List lists_[16];
  int i_ = 0, num_ = 0;
};

}  // namespace
