// A draft out of the places that resemble where a request has come to; reference_votes.py says it
// slowly. Each place votes for the token that came after it. The heaviest token is drafted, the
// places that voted for it stay, and vote on what comes next.
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

  // Finds the places for a text of a record.
  void gather(const Record& record, const Text& text);
  // At most `limit` tokens; returns how many.
  int elect(int limit, Elected* draft);

 private:
  struct Place {
    const int32_t* after;  // in a record
    uint64_t address;      // in the log, where `after` is null
    int64_t length;        // of what came after it
    int64_t weight;
    int16_t matched;
    uint8_t scope;
    bool own;  // past its end come the drafted tokens themselves
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
  int longest_ = 0;  // match of a place
  Place places_[kMostPlaces];
};
