#include "prompt_record.h"

#include <algorithm>

Text& Record::add(const int32_t* tokens, size_t count, int num_tail) {
  texts.push_back(std::make_unique<Text>());
  Text& text = *texts.back();
  text.index = uint32_t(texts.size() - 1);
  text.num_tail = num_tail;
  text.tokens.assign(tokens, tokens + count);
  text.previous.assign(count * kOrders, 0);
  totals_.texts++;
  totals_.tokens += int64_t(count);
  num_tokens_ += int64_t(count);
  index(text, num_tail);
  return text;
}

Text& Record::add_response(uint64_t group, int64_t version) {
  const auto& whole = prompt().tokens;
  const int tail = int(std::min<size_t>(whole.size(), kMaxMatchLength));
  Text& text = add(whole.data() + whole.size() - tail, tail, tail);
  text.group = group;
  text.version = version;
  return text;
}

void Record::append(Text& text, const int32_t* tokens, size_t count) {
  const size_t begin = text.tokens.size();
  text.tokens.insert(text.tokens.end(), tokens, tokens + count);
  text.previous.resize(text.tokens.size() * kOrders);
  totals_.tokens += int64_t(count);
  num_tokens_ += int64_t(count);
  index(text, begin);
}

void Record::index(Text& text, size_t begin) {
  for (size_t end = begin; end < text.tokens.size(); end++)
    for (int order = 0; order < kOrders; order++) {
      if (end < size_t(params_.orders[order])) continue;
      const uint32_t occurrence = text.index << kPositionBits | uint32_t(end);
      const uint32_t hash = hash_of(text.tokens.data() + end, params_.orders[order]);
      text.previous[end * kOrders + order] = tables_[order].replace(hash, occurrence);
    }
}

void Record::remove(Text& text) {
  text.removed = true;
  num_removed_ += int64_t(text.tokens.size());
  if (2 * num_removed_ >= num_tokens_) rebuild();
}

void Record::clear_finished() {
  for (Text* text : finished) text->removed = true;
  finished.clear();
  rebuild();
}

void Record::rebuild() {
  totals_.texts -= int64_t(texts.size());
  totals_.tokens -= num_tokens_;
  texts.erase(std::remove_if(texts.begin(), texts.end(), [](const auto& text) { return text->removed; }),
              texts.end());
  for (Table& table : tables_) table = Table();
  num_tokens_ = num_removed_ = 0;
  for (size_t i = 0; i < texts.size(); i++) {
    Text& text = *texts[i];
    text.index = uint32_t(i);
    num_tokens_ += int64_t(text.tokens.size());
    index(text, text.num_tail);
  }
  totals_.texts += int64_t(texts.size());
  totals_.tokens += num_tokens_;
}

int64_t Record::bytes() const {
  int64_t bytes = sizeof(Record);
  for (const Table& table : tables_) bytes += int64_t(table.bytes());
  bytes += int64_t(texts.capacity() * sizeof(texts[0]) + finished.capacity() * sizeof(Text*));
  for (const auto& text : texts)
    bytes += int64_t(sizeof(Text) + text->tokens.capacity() * 4 + text->previous.capacity() * 4);
  return bytes;
}
