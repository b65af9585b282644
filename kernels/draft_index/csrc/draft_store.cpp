#include "draft_store.h"

#include <algorithm>

int32_t Store::begin(uint64_t group, uint64_t key, const int32_t* prompt, int32_t length) {
  Record& record = record_of(key, prompt, length);
  if (int(record.texts.size()) == params_.max_texts) record.rebuild();
  if (int(record.texts.size()) == params_.max_texts) return kTooManyTexts;
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
  if (!is_used(slot)) return kUnknownSlot;
  Row row = std::move(rows_[slot]);
  rows_[slot] = Row();
  free_.push_back(slot);
  Record& record = *row.record;
  Text& text = *row.text;
  record.running--;
  used_.splice(used_.end(), used_, record.used);
  if (!keep || int(text.tokens.size()) == text.num_tail) {
    record.remove(text);
    return 0;
  }
  const int begin = std::max(0, text.num_tail - params_.all_order);
  log_.append(text.tokens.data() + begin, text.tokens.size() - begin, record.key, text.version);
  record.finished.push_back(&text);
  if (int(record.finished.size()) > params_.max_finished_texts) {
    Text& oldest = *record.finished.front();
    record.finished.erase(record.finished.begin());
    record.remove(oldest);
  }
  return 0;
}

int32_t Store::step(Step& step) {
  if (const int32_t error = check(step)) return error;
  const int32_t* tokens = step.tokens;
  for (int i = 0; i < step.num_rows; i++) {
    append(rows_[step.slots[i]], tokens, step.counts[i]);
    tokens += step.counts[i];
  }
  for (int i = 0; i < step.num_rows; i++) {
    const int limit = std::min(step.limits[i], params_.max_draft_tokens);
    step.lengths[i] = 0;
    if (limit) draft(rows_[step.slots[i]], limit, step, i);
  }
  evict();
  return 0;
}

int32_t Store::check(Step& step) {
  steps_++;
  for (int i = 0; i < step.num_rows; i++) {
    step.failed_row = i;
    if (!is_used(step.slots[i])) return kUnknownSlot;
    Row& row = rows_[step.slots[i]];
    if (std::exchange(row.last_step, steps_) == steps_) return kRepeatedSlot;
    if (int64_t(row.text->tokens.size()) + step.counts[i] > params_.max_text_tokens)
      return kTextTooLong;
  }
  return 0;
}

void Store::append(Row& row, const int32_t* tokens, int count) {
  if (!count) return;
  const auto done = [&](Pending& one) { return !score(one, tokens, count); };
  auto& pending = row.pending;
  pending.erase(std::remove_if(pending.begin(), pending.end(), done), pending.end());
  row.text->version = version_;
  row.record->append(*row.text, tokens, size_t(count));
}

// Scores a pending draft against new tokens. False once it was wrong or is fully compared.
bool Store::score(Pending& pending, const int32_t* tokens, int count) {
  for (int i = 0; i < count; i++) {
    const int at = pending.position++;
    const bool accepted = pending.tokens[at] == tokens[i];
    estimate_.update(pending.cells[at], pending.probabilities[at], accepted);
    if (!accepted || pending.position == pending.length) return false;
  }
  return true;
}

void Store::draft(Row& row, int limit, const Step& step, size_t index) {
  Votes votes(params_, log_, version_);
  votes.find_matches(*row.record, *row.text);
  DraftToken draft[kMaxDraftTokens];
  const int length = votes.draft(limit, draft);
  step.lengths[index] = length;
  // A previous draft that was not compared with any token yet is replaced.
  if (!row.pending.empty() && !row.pending.back().position) row.pending.pop_back();
  if (!length) return;
  row.pending.emplace_back();
  Pending& pending = row.pending.back();
  pending.length = int16_t(length);
  pending.position = 0;
  for (int i = 0; i < length; i++) {
    const DraftToken& one = draft[i];
    const int cell =
        AcceptanceEstimate::cell(one.scope, one.match_length, one.num_agreeing, one.total, i);
    const size_t at = index * params_.max_draft_tokens + i;
    pending.tokens[i] = step.drafts[at] = one.token;
    pending.cells[i] = uint16_t(cell);
    pending.probabilities[i] = step.probability[at] = estimate_.probability(cell);
    step.scope[at] = one.scope;
    step.match_length[at] = one.match_length;
    step.num_agreeing[at] = one.num_agreeing;
    step.total[at] = one.total;
  }
}

Record& Store::record_of(uint64_t key, const int32_t* prompt, int32_t length) {
  auto& record = records_[key];
  if (!record) {
    record = std::make_unique<Record>(params_, totals_, key);
    record->add(prompt, size_t(length), 0).version = version_;
    record->used = used_.insert(used_.end(), record.get());
  }
  return *record;
}

// Evicts prompts without running requests first, then finished responses of the others.
void Store::evict() {
  while (charge() > params_.max_bytes) {
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
    (*busy)->clear_finished();
  }
}

int64_t Store::bytes() const {
  int64_t bytes = params_.log_tokens * params_.log_token_bytes;
  for (const Record* record : used_) bytes += record->bytes();
  return bytes;
}
