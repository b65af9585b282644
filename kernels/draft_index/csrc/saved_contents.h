// Saved contents of a store, as arrays; file_format.py defines the file.
#pragma once
#include <cstdint>

struct Sizes {
  int64_t prompts, prompt_tokens, texts, text_tokens, log_texts, log_tokens;
};

struct Contents {
  uint32_t* prompt_lengths;
  int32_t* prompt_tokens;
  uint64_t* prompt_keys;
  uint32_t* text_counts;
  uint32_t *text_lengths, *text_ages;
  uint64_t* text_groups;
  int32_t* text_tokens;
  uint32_t *log_lengths, *log_ages;
  uint64_t* log_prompts;
  int32_t* log_tokens;
  uint32_t *tried, *accepted, *coarse_tried, *coarse_accepted;
};
