// All that is known of one prompt: its own text, the responses to it, and the places in them.
#pragma once
#include <list>
#include <memory>
#include <vector>

#include "rules.h"
#include "table.h"

struct Text {
  // A response begins with the end of its prompt, so that its first tokens have a context.
  std::vector<int32_t> tokens;
  // Of the place before each token, for each order: the place before it with that context.
  std::vector<uint32_t> older;
  uint64_t group = 0;
  int64_t version = 0;
  uint32_t index = 0;
  int32_t num_tail = 0;  // so many tokens are the prompt's
  bool dead = false;
};

// How much all records hold: what the budget is about.
struct Totals {
  int64_t records = 0, texts = 0, tokens = 0;
  int64_t charge(const Rules& rules) const {
    return records * rules.prompt_bytes + texts * rules.text_bytes + tokens * rules.token_bytes;
  }
};

// A place is a position in a text, in 32 bits.
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

  // A text with these tokens, of which only those after the tail are places yet.
  Text& add(const int32_t* tokens, size_t count, int num_tail);
  void append(Text& text, const int32_t* tokens, size_t count);
  Text& add_response(uint64_t group, int64_t version);
  // It is found no more; its room is won back when half of the record is of this kind.
  void drop(Text& text);
  void forget_finished();
  void rebuild();

  // The latest place behind the last of so many tokens.
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
  std::vector<Text*> finished;  // the oldest first
  int running = 0;
  std::list<Record*>::iterator used;  // where it stands in the order of use

 private:
  void index(Text& text, size_t begin);

  const Rules& rules_;
  Totals& totals_;
  Table tables_[kOrders];  // apart: a chain of places is of one order
  int64_t num_tokens_ = 0, num_dead_ = 0;
};
