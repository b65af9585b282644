// Parameters of params.py; the `Rules` structure in library.py mirrors this one.
#pragma once
#include <cstdint>

constexpr int kOrders = 3;
constexpr int kLongestDraft = 32;
constexpr int kLongestMatch = 32;
constexpr int kMostPlaces = 64;

struct Rules {
  int64_t max_bytes;
  int64_t log_tokens;  // a power of two
  int32_t longest;
  int32_t scopes;  // bit mask
  int32_t orders[kOrders];
  int32_t looks, places, enough;
  int32_t skip_below, skip_places;
  int32_t all_order, all_places, all_enough;
  int32_t history_texts, texts, text_tokens;
  int32_t age_shift;
  int32_t prompt_bytes, text_bytes, token_bytes, log_token_bytes;

  int64_t weight(int matched, int64_t age) const {
    return (int64_t(matched) * matched << 16) / ((int64_t(1) << age_shift) + age);
  }
};

// Source of a drafted token; Scope in interface.py.
enum Scope : uint8_t { kSelf = 0, kSiblings = 1, kPrompt = 2, kAll = 3 };
