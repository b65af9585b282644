// What the threads take, piece by piece: which queries meet which tokens, and who finishes a row.
#pragma once
#include <cstddef>
#include <vector>

#include "call.h"

// The queries of `rows` against positions [begin, end) in `blocks`, which hold the positions from
// `first` on; once for each KV head. A row that finishes here goes on with its suffix, takes in what
// earlier pieces have left for it, and is written out. Of the others the piece leaves partial results.
struct Piece {
  const int32_t* blocks;
  int first, begin, end;
  const int32_t* rows;
  int num_rows, num_queries;
  int ending;      // rows of which this is the last node finish here; or kEveryRow, kNoRow
  size_t partial;  // where its partial results begin, in floats
};

// Where the partial results of a row's queries are: in a list, because a row has few.
struct Share {
  int piece, query, next;
};

class Schedule {
 public:
  static constexpr int kEveryRow = -1, kNoRow = -2, kNone = -1;

  // Pieces wait for earlier ones only and are taken in order, so they cannot wait for each other.
  void build(const Call& call);

  bool finishes(const Piece& piece, int row) const {
    return piece.ending == kEveryRow || (piece.ending >= 0 && last_node_[row] == piece.ending);
  }
  int num_units(const Call& call) const { return int(pieces.size()) * call.num_kv_heads; }
  // The outputs of a piece's queries, then the base and the sum of each.
  size_t partial_of(const Piece& piece, const Call& call, int kv_head) const {
    return piece.partial + size_t(kv_head) * piece.num_queries * (call.head_size + 2);
  }

  std::vector<Piece> pieces;
  std::vector<Share> shares;
  std::vector<int> shares_of;      // per row, the first of its shares
  std::vector<int> suffix_begins;  // per row, where the part begins that is read as it finishes
  size_t num_partials;             // floats

 private:
  void find_nodes(const Call& call);
  void set_limit(const Call& call);
  void add_node(const Call& call, int node);
  void add_long_suffix(const Call& call, int row);
  void add_tokens(const Call& call, const Piece& piece);
  void add(const Call& call, Piece piece);
  double suffix_cost(const Call& call, int row) const;
  template <class Cost>
  int fitting(const Call& call, const int32_t* rows, int num_rows, Cost cost) const;

  double limit_;  // what one piece may cost
  std::vector<int> last_node_, node_begins_;
  std::vector<char> apart_;  // nodes whose rows finish in a piece of their own
  std::vector<int32_t> rows_;
};
