// Drafting by a vote of earlier contexts that match the end of a request's tokens.
// tests/kernels/draft_index/reference_votes.py is the reference. Each match votes for the token that
// follows it. The token with the largest total weight is drafted. The matches that voted for it
// remain, and vote on the next token.
#pragma once
#include "response_ring.h"
#include "prompt_record.h"

struct DraftToken {
  int32_t token;
  uint8_t scope;
  int16_t match_length, num_agreeing, total;
};

class Votes {
 public:
  Votes(const Params& params, const ResponseRing& log, int64_t version)
      : params_(params), log_(log), version_(version) {}

  // Finds the matches of the end of a text.
  void find_matches(const Record& record, const Text& text);
  // Drafts at most `limit` tokens; returns their number.
  int draft(int limit, DraftToken* draft);

 private:
  struct Match {
    const int32_t* after;  // following tokens, if the match is in a record
    uint64_t address;      // address in the log, if `after` is null
    int64_t length;        // number of following tokens
    int64_t weight;
    int16_t match_length;
    uint8_t scope;
    bool own;  // in the text itself: the drafted tokens continue it
    int32_t vote;
  };

  void look_up(const Record& record, const Text& text, int order, int longer);
  void look_up_before_mismatch(const Record& record, const Text& text);
  void look_up_in_log(const Record& record, const Text& text);
  void add(const Record& record, const Text& text, const Text& other, uint32_t end, int match_length);
  Scope scope_of(const Record& record, const Text& text, const Text& other) const;
  bool read(const Match& match, int position, const DraftToken* draft, int32_t& token) const;
  bool uses(int scope) const { return params_.scopes >> scope & 1; }

  const Params& params_;
  const ResponseRing& log_;
  const int64_t version_;
  int num_matches_ = 0;
  int longest_match_ = 0;  // length of the longest match in a record
  Match matches_[kMaxMatches];
};
