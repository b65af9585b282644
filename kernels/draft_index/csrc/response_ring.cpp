#include "response_ring.h"

ResponseRing::ResponseRing(const Params& params)
    : capacity_(uint64_t(params.log_tokens)),
      mask_(capacity_ - 1),
      order_(uint64_t(params.all_order)),
      // calloc: pages that are never written take no memory.
      tokens_(static_cast<int32_t*>(std::calloc(capacity_, 4))),
      previous_(static_cast<uint32_t*>(std::calloc(capacity_, 4))),
      owner_(static_cast<uint32_t*>(std::calloc(capacity_, 4))),
      table_(2 * capacity_),
      previous_table_(2 * capacity_) {
  if (!tokens_ || !previous_ || !owner_) std::abort();
}

ResponseRing::~ResponseRing() {
  std::free(tokens_);
  std::free(previous_);
  std::free(owner_);
}

uint64_t ResponseRing::latest(const int32_t* end, int length) const {
  if (length < int(order_)) return 0;
  const uint32_t hash = hash_of(end, int(order_));
  const uint32_t occurrence = table_.find(hash);
  return address(occurrence ? occurrence : previous_table_.find(hash));
}

void ResponseRing::append(const int32_t* tokens, size_t count, uint64_t prompt, int64_t version) {
  const uint64_t begin = head_;
  texts_.push_back({prompt, version, begin, begin + count});
  const uint32_t owner = first_text_ + uint32_t(texts_.size() - 1);
  constexpr size_t kAhead = 16;  // prefetch distance: table entries are scattered in memory
  for (size_t i = 0; i < count; i++, head_++) {
    if (i + kAhead < count && i + kAhead >= order_)
      table_.prefetch(hash_of(tokens + i + kAhead, int(order_)));
    if (head_ - table_begin_ == capacity_) {
      previous_table_ = std::move(table_);
      table_ = Table(2 * capacity_);
      table_begin_ = head_;
    }
    const uint64_t at = head_ & mask_;
    tokens_[at] = tokens[i];
    owner_[at] = owner;
    previous_[at] = 0;
    if (i < order_) continue;
    const uint32_t hash = hash_of(tokens + i, int(order_));
    const uint32_t occurrence = table_.replace(hash, uint32_t(head_));
    previous_[at] = occurrence ? occurrence : previous_table_.find(hash);
  }
  while (!texts_.empty() && texts_.front().end <= tail()) texts_.pop_front(), first_text_++;
}
