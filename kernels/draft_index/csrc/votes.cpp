#include "votes.h"

#include <algorithm>
#include <cstdlib>

namespace {

// Length of the common suffix.
int common_suffix(const int32_t* one, int64_t one_length, const int32_t* other, int64_t other_length) {
  const int most = int(std::min<int64_t>({one_length, other_length, kMaxMatchLength}));
  int match_length = 0;
  while (match_length < most && one[-1 - match_length] == other[-1 - match_length]) match_length++;
  return match_length;
}

// Factor on the vote of another response, by the distance of the positions in tokens.
int64_t position_weight(int64_t distance) {
  const int bits = distance > 1 ? 64 - __builtin_clzll(uint64_t(distance - 1)) : 0;
  return 8 >> std::min(3, std::max(0, bits - 1) / 2);
}

}  // namespace

void Votes::find_matches(const Record& record, const Text& text) {
  num_matches_ = longest_match_ = 0;
  int longer = kMaxMatchLength + 1;
  for (int order = 0; order < kOrders && num_matches_ < params_.min_votes; order++) {
    look_up(record, text, order, longer);
    longer = params_.orders[order];
  }
  if (longest_match_ < params_.mismatch_below) look_up_before_mismatch(record, text);
  if (uses(kAll) && num_matches_ < params_.all_min_votes) look_up_in_log(record, text);
}

void Votes::look_up(const Record& record, const Text& text, int order, int longer) {
  const auto length = int64_t(text.tokens.size());
  const int32_t* here = text.tokens.data() + length;
  uint32_t occurrence = record.latest(here, length, order);
  for (int num_lookups = 0;
       occurrence && num_lookups < params_.max_lookups && num_matches_ < params_.max_votes;
       occurrence = record.previous(occurrence, order)) {
    const Text& other = record.text_of(occurrence);
    const uint32_t end = occurrence & kPositionMask;
    const int match_length = common_suffix(other.tokens.data() + end, end, here, length);
    if (match_length < params_.orders[order]) continue;  // hash collision
    num_lookups++;
    if (!other.removed && match_length < longer) add(record, text, other, end, match_length);
  }
}

// Looks up the context before the last token: that token may be a mismatch with a text that
// continues in the same way afterwards.
void Votes::look_up_before_mismatch(const Record& record, const Text& text) {
  const auto length = int64_t(text.tokens.size()) - 1;
  const int32_t* here = text.tokens.data() + length;
  const int most = num_matches_ + params_.max_mismatch_votes;
  uint32_t occurrence = record.latest(here, length, 0);
  for (int num_lookups = 0; occurrence && num_lookups < params_.max_lookups && num_matches_ < most;
       occurrence = record.previous(occurrence, 0)) {
    const Text& other = record.text_of(occurrence);
    const uint32_t mismatch = occurrence & kPositionMask;
    const int match_length = common_suffix(other.tokens.data() + mismatch, mismatch, here, length);
    if (match_length < params_.orders[0]) continue;
    num_lookups++;
    if (!other.removed && other.tokens[mismatch] != *here && mismatch + 1 < other.tokens.size())
      add(record, text, other, mismatch + 1, match_length);
  }
}

void Votes::add(const Record& record, const Text& text, const Text& other, uint32_t end,
                int match_length) {
  const Scope scope = scope_of(record, text, other);
  if (!uses(scope)) return;
  int64_t weight = params_.weight(match_length, version_ - other.version);
  if (scope != kSelf) weight *= position_weight(std::abs(int64_t(text.tokens.size()) - int64_t(end)));
  matches_[num_matches_++] = {other.tokens.data() + end, 0, int64_t(other.tokens.size()) - end, weight,
                              int16_t(match_length), scope, &other == &text, 0};
  longest_match_ = std::max(longest_match_, match_length);
}

void Votes::look_up_in_log(const Record& record, const Text& text) {
  const auto length = int64_t(text.tokens.size());
  const int32_t* here = text.tokens.data() + length;
  const int most = num_matches_ + params_.all_max_votes;
  uint64_t end = log_.latest(here, int(length));
  for (int num_lookups = 0; end && num_lookups < params_.max_lookups && num_matches_ < most;
       end = log_.previous(end)) {
    const ResponseText& other = log_.text_of(end);
    const auto readable = int64_t(end - std::max(other.begin, log_.tail()));
    const int reach = int(std::min<int64_t>({readable, length, kMaxMatchLength}));
    int match_length = 0;
    while (match_length < reach && log_.token(end - 1 - match_length) == here[-1 - match_length])
      match_length++;
    if (match_length < params_.all_order) continue;
    num_lookups++;
    if (other.prompt == record.key) continue;
    const int64_t weight = params_.weight(match_length, version_ - other.version);
    matches_[num_matches_++] = {nullptr, end, int64_t(other.end - end), weight,
                                int16_t(match_length), kAll, false, 0};
  }
}

Scope Votes::scope_of(const Record& record, const Text& text, const Text& other) const {
  if (&other == &text || &other == record.texts[0].get()) return kSelf;
  return other.group == text.group ? kSiblings : kPrompt;
}

bool Votes::read(const Match& match, int position, const DraftToken* draft, int32_t& token) const {
  if (position < match.length)
    token = match.after ? match.after[position] : log_.token(match.address + position);
  else if (match.own)
    token = draft[position - match.length].token;
  else
    return false;
  return true;
}

int Votes::draft(int limit, DraftToken* draft) {
  for (int position = 0; position < limit; position++) {
    int total = 0;
    for (int i = 0; i < num_matches_; i++) {
      Match match = matches_[i];
      if (read(match, position, draft, match.vote)) matches_[total++] = match;
    }
    if (!total) return position;
    int32_t tokens[kMaxMatches];
    int64_t weights[kMaxMatches];
    int num_tokens = 0;
    for (int i = 0; i < total; i++) {
      int at = 0;
      while (at < num_tokens && tokens[at] != matches_[i].vote) at++;
      if (at == num_tokens) tokens[num_tokens] = matches_[i].vote, weights[num_tokens++] = 0;
      weights[at] += matches_[i].weight;
    }
    // max_element returns the first of equal weights.
    const int32_t token = tokens[std::max_element(weights, weights + num_tokens) - weights];
    num_matches_ = int(std::remove_if(matches_, matches_ + total,
                                      [&](const Match& match) { return match.vote != token; }) -
                       matches_);
    const Match& best = *std::max_element(
        matches_, matches_ + num_matches_,
        [](const Match& one, const Match& other) { return one.weight < other.weight; });
    draft[position] = {token, best.scope, best.match_length, int16_t(num_matches_), int16_t(total)};
  }
  return limit;
}
