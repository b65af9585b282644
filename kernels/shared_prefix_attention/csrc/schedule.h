// Schedule of a call: its pieces, that is queries and positions, and the piece that finishes a row.
#pragma once
#include <cstddef>
#include <vector>

#include "call.h"

// Attention of the queries of `rows` over positions [begin, end) in `blocks`, which start at
// position `first`; once per KV head. If a row finishes in this piece, its suffix is processed, the
// partial results of earlier pieces are merged, and its output is written. For other rows the piece
// stores partial results.
struct Piece {
  const int32_t* blocks;
  int first, begin, end;
  const int32_t* rows;
  int num_rows, num_queries;
  int ending;      // rows whose last node this is finish here; or kEveryRow, kNoRow
  size_t partial;  // offset of its partial results, in floats
};

// Location of partial results of a row. A linked list, because a row has few.
struct Share {
  int piece, query, next;
};

class Schedule {
 public:
  static constexpr int kEveryRow = -1, kNoRow = -2, kNone = -1;

  // Pieces wait only for earlier pieces and are taken in order, so there is no deadlock.
  void build(const Call& call);

  bool finishes(const Piece& piece, int row) const {
    return piece.ending == kEveryRow || (piece.ending >= 0 && last_node_[row] == piece.ending);
  }
  int num_units(const Call& call) const { return int(pieces.size()) * call.num_kv_heads; }
  // Offset of the outputs of a piece's queries, followed by their bases and their sums.
  size_t partial_of(const Piece& piece, const Call& call, int kv_head) const {
    return piece.partial + size_t(kv_head) * piece.num_queries * (call.head_size + 2);
  }

  std::vector<Piece> pieces;
  std::vector<Share> shares;
  std::vector<int> shares_of;      // per row, its first share
  std::vector<int> suffix_begins;  // per row, start of the positions read by the finishing piece
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

  double limit_;  // maximum cost of a piece
  std::vector<int> last_node_, node_begins_;
  std::vector<char> apart_;  // nodes whose rows finish in a separate piece
  std::vector<int32_t> rows_;
};
