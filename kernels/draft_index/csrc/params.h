// Parameters of interface.py; the `Params` structure in store.py mirrors this one.
#pragma once
#include <cstdint>

constexpr int kOrders = 3;
constexpr int kMaxDraftTokens = 32;
constexpr int kMaxMatchLength = 32;
constexpr int kMaxMatches = 64;

struct Params {
  int64_t max_bytes;
  int64_t log_tokens;  // a power of two
  int32_t max_draft_tokens;
  int32_t scopes;  // bit mask
  int32_t orders[kOrders];
  int32_t max_lookups, max_votes, min_votes;
  int32_t mismatch_below, max_mismatch_votes;
  int32_t all_order, all_max_votes, all_min_votes;
  int32_t max_finished_texts, max_texts, max_text_tokens;
  int32_t age_shift;
  int32_t prompt_bytes, text_bytes, token_bytes, log_token_bytes;

  int64_t weight(int match_length, int64_t age) const {
    return (int64_t(match_length) * match_length << 16) / ((int64_t(1) << age_shift) + age);
  }
};

// Source of a drafted token; Scope in interface.py.
enum Scope : uint8_t { kSelf = 0, kSiblings = 1, kPrompt = 2, kAll = 3 };
