// Conversion of a store to arrays and back.
#include "saved_contents.h"

#include <algorithm>

#include "draft_store.h"

namespace {

template <class T>
void put(T*& at, T value) {
  *at++ = value;
}

void put(int32_t*& at, const std::vector<int32_t>& tokens, size_t begin) {
  at = std::copy(tokens.begin() + long(begin), tokens.end(), at);
}

}  // namespace

Sizes Store::sizes() const {
  Sizes sizes{int64_t(records_.size()), 0, 0, 0, int64_t(log_.texts().size()),
              int64_t(log_.head() - log_.tail())};
  for (Record* record : used_) {
    sizes.prompt_tokens += int64_t(record->prompt().tokens.size());
    sizes.texts += int64_t(record->finished.size());
    for (const Text* text : record->finished)
      sizes.text_tokens += int64_t(text->tokens.size()) - text->num_tail;
  }
  return sizes;
}

void Store::write(const Contents& contents) const {
  Contents at = contents;
  for (Record* record : used_) {
    put(at.prompt_lengths, uint32_t(record->prompt().tokens.size()));
    put(at.prompt_tokens, record->prompt().tokens, 0);
    put(at.text_counts, uint32_t(record->finished.size()));
    for (const Text* text : record->finished) {
      put(at.text_lengths, uint32_t(text->tokens.size() - text->num_tail));
      put(at.text_ages, uint32_t(version_ - text->version));
      put(at.text_groups, text->group);
      put(at.text_tokens, text->tokens, size_t(text->num_tail));
    }
  }
  for (const ResponseText& text : log_.texts()) {
    const uint64_t begin = std::max(text.begin, log_.tail());
    put(at.log_lengths, uint32_t(text.end - begin));
    put(at.log_ages, uint32_t(version_ - text.version));
    put(at.log_prompts, text.prompt);
    for (uint64_t i = begin; i < text.end; i++) put(at.log_tokens, log_.token(i));
  }
  std::copy(estimate_.tried, estimate_.tried + kCells, at.tried);
  std::copy(estimate_.accepted, estimate_.accepted + kCells, at.accepted);
  std::copy(estimate_.coarse_tried, estimate_.coarse_tried + kCoarseCells, at.coarse_tried);
  std::copy(estimate_.coarse_accepted, estimate_.coarse_accepted + kCoarseCells, at.coarse_accepted);
}

// The store must be empty. Versions are renumbered so that the oldest text has version 0.
void Store::read(const Sizes& sizes, const Contents& contents) {
  Contents at = contents;
  for (int64_t i = 0; i < sizes.texts; i++) version_ = std::max(version_, int64_t(at.text_ages[i]));
  for (int64_t i = 0; i < sizes.log_texts; i++) version_ = std::max(version_, int64_t(at.log_ages[i]));
  for (int64_t i = 0; i < sizes.prompts; i++) {
    Record& record = record_of(*at.prompt_keys++, at.prompt_tokens, int32_t(*at.prompt_lengths));
    at.prompt_tokens += *at.prompt_lengths++;
    for (uint32_t left = *at.text_counts++; left; left--) {
      Text& text = record.add_response(*at.text_groups++, version_ - *at.text_ages++);
      record.append(text, at.text_tokens, *at.text_lengths);
      record.finished.push_back(&text);
      at.text_tokens += *at.text_lengths++;
    }
  }
  for (int64_t i = 0; i < sizes.log_texts; i++) {
    log_.append(at.log_tokens, *at.log_lengths, *at.log_prompts++, version_ - *at.log_ages++);
    at.log_tokens += *at.log_lengths++;
  }
  std::copy(at.tried, at.tried + kCells, estimate_.tried);
  std::copy(at.accepted, at.accepted + kCells, estimate_.accepted);
  std::copy(at.coarse_tried, at.coarse_tried + kCoarseCells, estimate_.coarse_tried);
  std::copy(at.coarse_accepted, at.coarse_accepted + kCoarseCells, estimate_.coarse_accepted);
  evict();
}
