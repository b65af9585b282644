// Drafting by a vote of the places whose contexts match the end of a request's tokens.
// tests/kernels/draft_index/reference_votes.py is the reference. Each place votes for the token
// that follows it. The token with the largest total weight is drafted. The places that voted for it
// remain, and vote on the next token.
#pragma once
#include "log.h"
#include "record.h"

struct Elected {
  int32_t token;
  uint8_t scope;
  int16_t matched, agreeing, total;
};

class Votes {
 public:
  Votes(const Rules& rules, const Log& log, int64_t version)
      : rules_(rules), log_(log), version_(version) {}

  // Finds the matching places for a text of a record.
  void gather(const Record& record, const Text& text);
  // Drafts at most `limit` tokens; returns their number.
  int elect(int limit, Elected* draft);

 private:
  struct Place {
    const int32_t* after;  // following tokens, if the place is in a record
    uint64_t address;      // address in the log, if `after` is null
    int64_t length;        // number of following tokens
    int64_t weight;
    int16_t matched;
    uint8_t scope;
    bool own;  // in the text itself: the drafted tokens continue it
    int32_t vote;
  };

  void look(const Record& record, const Text& text, int order, int longer);
  void look_behind_a_slip(const Record& record, const Text& text);
  void look_in_log(const Record& record, const Text& text);
  void add(const Record& record, const Text& text, const Text& other, uint32_t end, int matched);
  Scope scope_of(const Record& record, const Text& text, const Text& other) const;
  bool read(const Place& place, int position, const Elected* draft, int32_t& token) const;
  bool wanted(int scope) const { return rules_.scopes >> scope & 1; }

  const Rules& rules_;
  const Log& log_;
  const int64_t version_;
  int num_places_ = 0;
  int longest_ = 0;  // longest match of a place in a record
  Place places_[kMostPlaces];
};
