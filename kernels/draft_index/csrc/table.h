// Hash table from the hash of a context to the latest occurrence after it. Zero means no occurrence.
//
// Contexts with equal hashes share an entry, so callers must compare the tokens.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <utility>

// Hash of the `order` tokens before `end`.
inline uint32_t hash_of(const int32_t* end, int order) {
  uint64_t hash = 0;
  for (int i = 1; i <= order; i++) {
    hash = (hash ^ uint32_t(end[-i])) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
  return uint32_t(hash * 0xD6E8FEB86659FD93u >> 32);
}

class Table {
 public:
  Table() = default;
  // `entries` is a power of two, at least twice the expected number of contexts.
  explicit Table(uint64_t entries) { make(entries); }
  ~Table() { std::free(entries_); }
  Table(const Table&) = delete;
  Table& operator=(Table&& other) noexcept {
    std::swap(entries_, other.entries_);
    std::swap(size_, other.size_);
    std::swap(used_, other.used_);
    std::swap(shift_, other.shift_);
    return *this;
  }

  uint32_t find(uint32_t hash) const { return used_ ? at(hash).head : 0; }

  // Stores an occurrence and returns the previous one.
  uint32_t replace(uint32_t hash, uint32_t head) {
    if (4 * (used_ + 1) > 3 * size_) grow();
    Entry& entry = at(hash);
    used_ += !entry.head;
    entry.hash = hash;
    return std::exchange(entry.head, head);
  }

  void prefetch(uint32_t hash) const {
    if (entries_) __builtin_prefetch(entries_ + (hash >> shift_));
  }

  uint64_t bytes() const { return size_ * sizeof(Entry); }

 private:
  struct Entry {
    uint32_t hash, head;
  };

  // Entry of this hash, or the free entry at which it would be inserted.
  Entry& at(uint32_t hash) const {
    uint64_t at = hash >> shift_;
    while (entries_[at].head && entries_[at].hash != hash) at = (at + 1) & (size_ - 1);
    return entries_[at];
  }

  void make(uint64_t entries) {
    size_ = entries;
    shift_ = 32 - __builtin_ctzll(entries);
    entries_ = static_cast<Entry*>(std::calloc(entries, sizeof(Entry)));
    if (!entries_) std::abort();
  }

  void grow() {
    Table larger(size_ ? 2 * size_ : 16);
    for (uint64_t i = 0; i < size_; i++)
      if (entries_[i].head) larger.at(entries_[i].hash) = entries_[i];
    larger.used_ = used_;
    *this = std::move(larger);
  }

  Entry* entries_ = nullptr;
  uint64_t size_ = 0, used_ = 0;
  int shift_ = 32;
};
