// Record of one prompt: its tokens, the responses to it, and an n-gram index of both.
#pragma once
#include <list>
#include <memory>
#include <vector>

#include "params.h"
#include "table.h"

struct Text {
  // A response starts with the last tokens of its prompt, as context of its first tokens.
  std::vector<int32_t> tokens;
  // Per token and order, the previous occurrence with the same context: chains of occurrences.
  std::vector<uint32_t> previous;
  uint64_t group = 0;
  int64_t version = 0;
  uint32_t index = 0;
  int32_t num_tail = 0;  // number of leading tokens that belong to the prompt
  bool removed = false;
};

// Totals over all records, which are charged against the memory budget.
struct Totals {
  int64_t records = 0, texts = 0, tokens = 0;
  int64_t charge(const Params& params) const {
    return records * params.prompt_bytes + texts * params.text_bytes + tokens * params.token_bytes;
  }
};

// An occurrence is a text index and a token position in that text, packed into 32 bits.
constexpr int kPositionBits = 21;
constexpr uint32_t kPositionMask = (1u << kPositionBits) - 1;

class Record {
 public:
  Record(const Params& params, Totals& totals, uint64_t key)
      : key(key), params_(params), totals_(totals) {
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
  // Removes a text from lookups. Memory is reclaimed once half of the record's tokens are
  // removed.
  void remove(Text& text);
  void clear_finished();
  void rebuild();

  // Latest occurrence after the n-gram of the given order that ends at `end`.
  uint32_t latest(const int32_t* end, int64_t length, int order) const {
    if (length < params_.orders[order]) return 0;
    return tables_[order].find(hash_of(end, params_.orders[order]));
  }
  const Text& text_of(uint32_t occurrence) const { return *texts[occurrence >> kPositionBits]; }
  uint32_t previous(uint32_t occurrence, int order) const {
    return text_of(occurrence).previous[size_t(occurrence & kPositionMask) * kOrders + order];
  }
  int64_t bytes() const;

  const uint64_t key;
  std::vector<std::unique_ptr<Text>> texts;
  std::vector<Text*> finished;  // oldest first
  int running = 0;
  std::list<Record*>::iterator used;  // position in the store's LRU list

 private:
  void index(Text& text, size_t begin);

  const Params& params_;
  Totals& totals_;
  Table tables_[kOrders];  // one per order, as a chain of occurrences is of one order
  int64_t num_tokens_ = 0, num_removed_ = 0;
};
