// Ring buffer of the latest finished responses to any prompt, each preceded by its prompt's end.
//
// Addresses of tokens increase monotonically. Tokens older than the capacity of the ring are
// overwritten, and chains of occurrences end there. The table is replaced each time the ring
// has wrapped around; lookups also search the previous table, so the two cover the whole ring.
#pragma once
#include <algorithm>
#include <deque>
#include <vector>

#include "params.h"
#include "table.h"

struct ResponseText {
  uint64_t prompt;
  int64_t version;
  uint64_t begin, end;
};

class ResponseRing {
 public:
  explicit ResponseRing(const Params& params);
  ~ResponseRing();

  void append(const int32_t* tokens, size_t count, uint64_t prompt, int64_t version);
  uint64_t tail() const { return std::max<uint64_t>(head_, capacity_ + kFirst) - capacity_; }

  int32_t token(uint64_t address) const { return tokens_[address & mask_]; }
  // Address of an occurrence, of which 32 bits are stored; 0 if it has been overwritten.
  uint64_t address(uint32_t occurrence) const {
    const uint64_t address = head_ - uint32_t(uint32_t(head_) - occurrence);
    return occurrence && address >= tail() + order_ ? address : 0;
  }
  uint64_t latest(const int32_t* end, int length) const;
  uint64_t previous(uint64_t address) const { return this->address(previous_[address & mask_]); }
  const ResponseText& text_of(uint64_t address) const {
    return texts_[uint32_t(owner_[address & mask_] - first_text_)];
  }

 private:
  static constexpr uint64_t kFirst = 1;  // 0 means no occurrence

  const uint64_t capacity_, mask_, order_;
  uint64_t head_ = kFirst, table_begin_ = kFirst;
  int32_t* tokens_;
  uint32_t *previous_, *owner_;
  uint32_t first_text_ = 0;
  std::deque<ResponseText> texts_;
  Table table_, previous_table_;
};
