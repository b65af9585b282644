#include "votes.h"

#include <algorithm>
#include <cstdlib>

namespace {

// Length of the common suffix.
int common_end(const int32_t* one, int64_t one_length, const int32_t* other, int64_t other_length) {
  const int most = int(std::min<int64_t>({one_length, other_length, kLongestMatch}));
  int matched = 0;
  while (matched < most && one[-1 - matched] == other[-1 - matched]) matched++;
  return matched;
}

// Factor on the vote of another response, by the distance of the positions in tokens.
int64_t nearness(int64_t apart) {
  const int bits = apart > 1 ? 64 - __builtin_clzll(uint64_t(apart - 1)) : 0;
  return 8 >> std::min(3, std::max(0, bits - 1) / 2);
}

}  // namespace

void Votes::gather(const Record& record, const Text& text) {
  num_places_ = longest_ = 0;
  int longer = kLongestMatch + 1;
  for (int order = 0; order < kOrders && num_places_ < rules_.enough; order++) {
    look(record, text, order, longer);
    longer = rules_.orders[order];
  }
  if (longest_ < rules_.skip_below) look_behind_a_slip(record, text);
  if (wanted(kAll) && num_places_ < rules_.all_enough) look_in_log(record, text);
}

void Votes::look(const Record& record, const Text& text, int order, int longer) {
  const auto length = int64_t(text.tokens.size());
  const int32_t* here = text.tokens.data() + length;
  uint32_t place = record.latest(here, length, order);
  for (int looks = 0; place && looks < rules_.looks && num_places_ < rules_.places;
       place = record.older(place, order)) {
    const Text& other = record.text_of(place);
    const uint32_t end = place & kPositionMask;
    const int matched = common_end(other.tokens.data() + end, end, here, length);
    if (matched < rules_.orders[order]) continue;  // hash collision
    looks++;
    if (!other.dead && matched < longer) add(record, text, other, end, matched);
  }
}

// Looks up the context before the last token: that token may be a mismatch with a text that
// continues in the same way afterwards.
void Votes::look_behind_a_slip(const Record& record, const Text& text) {
  const auto length = int64_t(text.tokens.size()) - 1;
  const int32_t* here = text.tokens.data() + length;
  const int most = num_places_ + rules_.skip_places;
  uint32_t place = record.latest(here, length, 0);
  for (int looks = 0; place && looks < rules_.looks && num_places_ < most;
       place = record.older(place, 0)) {
    const Text& other = record.text_of(place);
    const uint32_t slip = place & kPositionMask;
    const int matched = common_end(other.tokens.data() + slip, slip, here, length);
    if (matched < rules_.orders[0]) continue;
    looks++;
    if (!other.dead && other.tokens[slip] != *here && slip + 1 < other.tokens.size())
      add(record, text, other, slip + 1, matched);
  }
}

void Votes::add(const Record& record, const Text& text, const Text& other, uint32_t end, int matched) {
  const Scope scope = scope_of(record, text, other);
  if (!wanted(scope)) return;
  int64_t weight = rules_.weight(matched, version_ - other.version);
  if (scope != kSelf) weight *= nearness(std::abs(int64_t(text.tokens.size()) - int64_t(end)));
  places_[num_places_++] = {other.tokens.data() + end, 0, int64_t(other.tokens.size()) - end, weight,
                            int16_t(matched), scope, &other == &text, 0};
  longest_ = std::max(longest_, matched);
}

void Votes::look_in_log(const Record& record, const Text& text) {
  const auto length = int64_t(text.tokens.size());
  const int32_t* here = text.tokens.data() + length;
  const int most = num_places_ + rules_.all_places;
  uint64_t end = log_.latest(here, int(length));
  for (int looks = 0; end && looks < rules_.looks && num_places_ < most; end = log_.older(end)) {
    const Logged& other = log_.text_of(end);
    const auto readable = int64_t(end - std::max(other.begin, log_.tail()));
    const int reach = int(std::min<int64_t>({readable, length, kLongestMatch}));
    int matched = 0;
    while (matched < reach && log_.token(end - 1 - matched) == here[-1 - matched]) matched++;
    if (matched < rules_.all_order) continue;
    looks++;
    if (other.prompt == record.key) continue;
    places_[num_places_++] = {nullptr, end, int64_t(other.end - end), rules_.weight(matched, version_ - other.version),
                              int16_t(matched), kAll, false, 0};
  }
}

Scope Votes::scope_of(const Record& record, const Text& text, const Text& other) const {
  if (&other == &text || &other == record.texts[0].get()) return kSelf;
  return other.group == text.group ? kSiblings : kPrompt;
}

bool Votes::read(const Place& place, int position, const Elected* draft, int32_t& token) const {
  if (position < place.length)
    token = place.after ? place.after[position] : log_.token(place.address + position);
  else if (place.own)
    token = draft[position - place.length].token;
  else
    return false;
  return true;
}

int Votes::elect(int limit, Elected* draft) {
  for (int position = 0; position < limit; position++) {
    int total = 0;
    for (int i = 0; i < num_places_; i++) {
      Place place = places_[i];
      if (read(place, position, draft, place.vote)) places_[total++] = place;
    }
    if (!total) return position;
    int32_t tokens[kMostPlaces];
    int64_t weights[kMostPlaces];
    int num_tokens = 0;
    for (int i = 0; i < total; i++) {
      int at = 0;
      while (at < num_tokens && tokens[at] != places_[i].vote) at++;
      if (at == num_tokens) tokens[num_tokens] = places_[i].vote, weights[num_tokens++] = 0;
      weights[at] += places_[i].weight;
    }
    // max_element returns the first of equal weights.
    const int32_t token = tokens[std::max_element(weights, weights + num_tokens) - weights];
    num_places_ = int(std::remove_if(places_, places_ + total,
                                     [&](const Place& place) { return place.vote != token; }) -
                      places_);
    const Place& best = *std::max_element(
        places_, places_ + num_places_,
        [](const Place& one, const Place& other) { return one.weight < other.weight; });
    draft[position] = {token, best.scope, best.matched, int16_t(num_places_), int16_t(total)};
  }
  return limit;
}
