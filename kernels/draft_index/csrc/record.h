// Record of one prompt: its tokens, the responses to it, and an n-gram index of both.
#pragma once
#include <list>
#include <memory>
#include <vector>

#include "rules.h"
#include "table.h"

struct Text {
  // A response starts with the last tokens of its prompt, as context of its first tokens.
  std::vector<int32_t> tokens;
  // Per token and order, the previous place with the same context: chains of places.
  std::vector<uint32_t> older;
  uint64_t group = 0;
  int64_t version = 0;
  uint32_t index = 0;
  int32_t num_tail = 0;  // number of leading tokens that belong to the prompt
  bool dead = false;
};

// Totals over all records, which are charged against the memory budget.
struct Totals {
  int64_t records = 0, texts = 0, tokens = 0;
  int64_t charge(const Rules& rules) const {
    return records * rules.prompt_bytes + texts * rules.text_bytes + tokens * rules.token_bytes;
  }
};

// A place is a text index and a token position in that text, packed into 32 bits.
constexpr int kPositionBits = 21;
constexpr uint32_t kPositionMask = (1u << kPositionBits) - 1;

class Record {
 public:
  Record(const Rules& rules, Totals& totals, uint64_t key) : key(key), rules_(rules), totals_(totals) {
    totals_.records++;
  }
  ~Record() {
    totals_.records--;
    totals_.texts -= int64_t(texts.size());
    for (const auto& text : texts) totals_.tokens -= int64_t(text->tokens.size());
  }

  Text& prompt() { return *texts[0]; }

  // Adds a text with these tokens and indexes the tokens after its first `num_tail`.
  Text& add(const int32_t* tokens, size_t count, int num_tail);
  void append(Text& text, const int32_t* tokens, size_t count);
  Text& add_response(uint64_t group, int64_t version);
  // Removes a text from lookups. Memory is reclaimed once half of the record's tokens are dead.
  void drop(Text& text);
  void forget_finished();
  void rebuild();

  // Latest place after the n-gram of the given order that ends at `end`.
  uint32_t latest(const int32_t* end, int64_t length, int order) const {
    if (length < rules_.orders[order]) return 0;
    return tables_[order].find(hash_of(end, rules_.orders[order]));
  }
  const Text& text_of(uint32_t place) const { return *texts[place >> kPositionBits]; }
  uint32_t older(uint32_t place, int order) const {
    return text_of(place).older[size_t(place & kPositionMask) * kOrders + order];
  }
  int64_t bytes() const;

  const uint64_t key;
  std::vector<std::unique_ptr<Text>> texts;
  std::vector<Text*> finished;  // oldest first
  int running = 0;
  std::list<Record*>::iterator used;  // position in the store's LRU list

 private:
  void index(Text& text, size_t begin);

  const Rules& rules_;
  Totals& totals_;
  Table tables_[kOrders];  // one per order, as a chain of places is of one order
  int64_t num_tokens_ = 0, num_dead_ = 0;
};
