#include "store.h"

#include <algorithm>

int32_t Store::begin(uint64_t group, uint64_t key, const int32_t* prompt, int32_t length) {
  Record& record = record_of(key, prompt, length);
  if (int(record.texts.size()) == rules_.texts) record.rebuild();
  if (int(record.texts.size()) == rules_.texts) return kTooManyTexts;
  Text& text = record.add_response(group, version_);
  record.running++;
  record.prompt().version = version_;
  used_.splice(used_.end(), used_, record.used);
  if (free_.empty()) {
    free_.push_back(int32_t(rows_.size()));
    rows_.emplace_back();
  }
  const int32_t slot = free_.back();
  free_.pop_back();
  rows_[slot].record = &record;
  rows_[slot].text = &text;
  evict();
  return slot;
}

int32_t Store::end(int32_t slot, bool keep) {
  if (!held(slot)) return kUnknownSlot;
  Row row = std::move(rows_[slot]);
  rows_[slot] = Row();
  free_.push_back(slot);
  Record& record = *row.record;
  Text& text = *row.text;
  record.running--;
  used_.splice(used_.end(), used_, record.used);
  if (!keep || int(text.tokens.size()) == text.num_tail) {
    record.drop(text);
    return 0;
  }
  const int begin = std::max(0, text.num_tail - rules_.all_order);
  log_.append(text.tokens.data() + begin, text.tokens.size() - begin, record.key, text.version);
  record.finished.push_back(&text);
  if (int(record.finished.size()) > rules_.history_texts) {
    Text& oldest = *record.finished.front();
    record.finished.erase(record.finished.begin());
    record.drop(oldest);
  }
  return 0;
}

int32_t Store::step(Step& step) {
  if (const int32_t refusal = check(step)) return refusal;
  const int32_t* tokens = step.tokens;
  for (int i = 0; i < step.num_rows; i++) {
    append(rows_[step.slots[i]], tokens, step.counts[i]);
    tokens += step.counts[i];
  }
  for (int i = 0; i < step.num_rows; i++) {
    const int limit = std::min(step.limits[i], rules_.longest);
    step.lengths[i] = 0;
    if (limit) draft(rows_[step.slots[i]], limit, step, i);
  }
  evict();
  return 0;
}

int32_t Store::check(Step& step) {
  steps_++;
  for (int i = 0; i < step.num_rows; i++) {
    step.refused = i;
    if (!held(step.slots[i])) return kUnknownSlot;
    Row& row = rows_[step.slots[i]];
    if (std::exchange(row.stepped, steps_) == steps_) return kSlotTwice;
    if (int64_t(row.text->tokens.size()) + step.counts[i] > rules_.text_tokens) return kTextTooLong;
  }
  return 0;
}

void Store::append(Row& row, const int32_t* tokens, int count) {
  if (!count) return;
  const auto done = [&](Pending& one) { return !still_right(one, tokens, count); };
  auto& pending = row.pending;
  pending.erase(std::remove_if(pending.begin(), pending.end(), done), pending.end());
  row.text->version = version_;
  row.record->append(*row.text, tokens, size_t(count));
}

// Scores a pending draft against new tokens. False once it was wrong or is fully compared.
bool Store::still_right(Pending& pending, const int32_t* tokens, int count) {
  for (int i = 0; i < count; i++) {
    const int at = pending.position++;
    const bool came = pending.tokens[at] == tokens[i];
    calibration_.learn(pending.cells[at], pending.probabilities[at], came);
    if (!came || pending.position == pending.length) return false;
  }
  return true;
}

void Store::draft(Row& row, int limit, const Step& step, size_t index) {
  Votes votes(rules_, log_, version_);
  votes.gather(*row.record, *row.text);
  Elected elected[kLongestDraft];
  const int length = votes.elect(limit, elected);
  step.lengths[index] = length;
  // A previous draft that was not compared with any token yet is replaced.
  if (!row.pending.empty() && !row.pending.back().position) row.pending.pop_back();
  if (!length) return;
  row.pending.emplace_back();
  Pending& pending = row.pending.back();
  pending.length = int16_t(length);
  pending.position = 0;
  for (int i = 0; i < length; i++) {
    const Elected& one = elected[i];
    const int cell = Calibration::cell(one.scope, one.matched, one.agreeing, one.total, i);
    const size_t at = index * rules_.longest + i;
    pending.tokens[i] = step.drafts[at] = one.token;
    pending.cells[i] = uint16_t(cell);
    pending.probabilities[i] = step.probability[at] = calibration_.probability(cell);
    step.scope[at] = one.scope;
    step.matched[at] = one.matched;
    step.agreeing[at] = one.agreeing;
    step.total[at] = one.total;
  }
}

Record& Store::record_of(uint64_t key, const int32_t* prompt, int32_t length) {
  auto& held = records_[key];
  if (!held) {
    held = std::make_unique<Record>(rules_, totals_, key);
    held->add(prompt, size_t(length), 0).version = version_;
    held->used = used_.insert(used_.end(), held.get());
  }
  return *held;
}

// Evicts prompts without running requests first, then finished responses of the others.
void Store::evict() {
  while (charge() > rules_.max_bytes) {
    const auto idle = std::find_if(used_.begin(), used_.end(), [](Record* one) { return !one->running; });
    if (idle != used_.end()) {
      const uint64_t key = (*idle)->key;
      used_.erase(idle);
      records_.erase(key);
      continue;
    }
    const auto busy =
        std::find_if(used_.begin(), used_.end(), [](Record* one) { return !one->finished.empty(); });
    if (busy == used_.end()) return;
    (*busy)->forget_finished();
  }
}

int64_t Store::bytes() const {
  int64_t bytes = rules_.log_tokens * rules_.log_token_bytes;
  for (const Record* record : used_) bytes += record->bytes();
  return bytes;
}
