// The latest finished responses to any prompt, the end of the prompt before each, in a ring.
//
// A token's address only ever grows; what is older than the ring is long cannot be read any more,
// and whoever follows a chain of places ends there. The table of places is renewed whenever the ring
// has gone round, and the one before it is asked as well: together they know all that can be read.
#pragma once
#include <algorithm>
#include <deque>
#include <vector>

#include "rules.h"
#include "table.h"

struct Logged {
  uint64_t prompt;
  int64_t version;
  uint64_t begin, end;
};

class Log {
 public:
  explicit Log(const Rules& rules);
  ~Log();

  void append(const int32_t* tokens, size_t count, uint64_t prompt, int64_t version);
  uint64_t tail() const { return std::max<uint64_t>(head_, capacity_ + kFirst) - capacity_; }
  uint64_t head() const { return head_; }
  const std::deque<Logged>& texts() const { return texts_; }

  int32_t token(uint64_t address) const { return tokens_[address & mask_]; }
  // Where the place is that was put in so many bits; 0 if it can be read no more.
  uint64_t address(uint32_t place) const {
    const uint64_t address = head_ - uint32_t(uint32_t(head_) - place);
    return place && address >= tail() + order_ ? address : 0;
  }
  uint64_t latest(const int32_t* end, int length) const;
  uint64_t older(uint64_t address) const { return this->address(older_[address & mask_]); }
  const Logged& text_of(uint64_t address) const {
    return texts_[uint32_t(owner_[address & mask_] - first_text_)];
  }

 private:
  static constexpr uint64_t kFirst = 1;  // place 0 is none

  const uint64_t capacity_, mask_, order_;
  uint64_t head_ = kFirst, renewed_ = kFirst;
  int32_t* tokens_;
  uint32_t *older_, *owner_;
  uint32_t first_text_ = 0;
  std::deque<Logged> texts_;
  Table table_, table_before_;
};
