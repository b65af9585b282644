// The draft store. Not thread-safe. tests/kernels/draft_index/reference.py is the reference.
#pragma once
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "acceptance_estimate.h"
#include "response_ring.h"
#include "prompt_record.h"
#include "votes.h"

// Error codes, returned instead of a slot or zero; store.py has the messages.
enum ErrorCode : int32_t {
  kUnknownSlot = -1,
  kRepeatedSlot = -2,
  kTextTooLong = -3,
  kTooManyTexts = -4,
};

// Arguments of one step; the `Step` structure in store.py mirrors this one.
struct Step {
  const int32_t *slots, *counts, *tokens, *limits;
  int32_t* lengths;  // [rows]
  int32_t* drafts;   // [rows, max_draft_tokens], like all arrays below
  uint8_t* scope;
  int16_t *match_length, *num_agreeing, *total;
  float* probability;
  int32_t num_rows;
  int32_t failed_row;  // row that caused an error
};

class Store {
 public:
  explicit Store(const Params& params) : params_(params), log_(params_) {}

  int32_t begin(uint64_t group, uint64_t key, const int32_t* prompt, int32_t length);
  int32_t end(int32_t slot, bool keep);
  void age() { version_++; }
  int32_t step(Step& step);

  int64_t charge() const {
    return params_.log_tokens * params_.log_token_bytes + totals_.charge(params_);
  }
  int64_t num_tokens() const { return totals_.tokens; }
  // Allocated bytes, without the pending drafts of running rows.
  int64_t bytes() const;
  const AcceptanceEstimate& estimate() const { return estimate_; }

 private:
  // A draft that is compared with the tokens that are generated.
  struct Pending {
    int32_t tokens[kMaxDraftTokens];
    uint16_t cells[kMaxDraftTokens];
    float probabilities[kMaxDraftTokens];
    int16_t length, position;
  };
  struct Row {
    Record* record = nullptr;  // null: the slot is free
    Text* text = nullptr;
    std::vector<Pending> pending;
    uint64_t last_step = 0;
  };

  Record& record_of(uint64_t key, const int32_t* prompt, int32_t length);
  int32_t check(Step& step);
  void append(Row& row, const int32_t* tokens, int count);
  bool score(Pending& pending, const int32_t* tokens, int count);
  void draft(Row& row, int limit, const Step& step, size_t at);
  void evict();
  bool is_used(int32_t slot) const {
    return slot >= 0 && size_t(slot) < rows_.size() && rows_[slot].record;
  }

  const Params params_;
  int64_t version_ = 0;
  uint64_t steps_ = 0;
  Totals totals_;
  std::unordered_map<uint64_t, std::unique_ptr<Record>> records_;
  std::list<Record*> used_;  // least recently used first
  std::vector<Row> rows_;
  std::vector<int32_t> free_;
  ResponseRing log_;
  AcceptanceEstimate estimate_;
};
