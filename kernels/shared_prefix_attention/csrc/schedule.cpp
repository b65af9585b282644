#include "schedule.h"

#include <algorithm>
#include <cmath>

namespace {
// The unit of cost is one query times one token. Packing a token costs as much as kPacking queries.
constexpr double kPacking = 12;
constexpr double kLeastCost = 4096;
// The KV heads of a block are adjacent in memory, and so are their page-table entries. Pieces of
// rows without a node are small enough that these entries are still cached for the next KV head.
constexpr double kRowsCost = 4 * kLeastCost;
// The accumulated outputs of a piece's queries must fit in the core's cache.
constexpr int kMostFloats = 32 * 1024;
constexpr int kFewestTokens = 256, kTile = 128;

double cost_of(int tokens, int queries) { return tokens * (queries + kPacking); }
}  // namespace

void Schedule::build(const Call& call) {
  pieces.clear();
  shares.clear();
  num_partials = 0;
  shares_of.assign(call.num_rows, kNone);
  suffix_begins.assign(call.suffix_starts, call.suffix_starts + call.num_rows);
  find_nodes(call);
  set_limit(call);
  for (int node = 0; node < call.num_nodes; node++) add_node(call, node);

  rows_.clear();
  for (int row = 0; row < call.num_rows; row++)
    if (last_node_[row] == kNone || apart_[last_node_[row]]) rows_.push_back(row);
  for (int row : rows_) add_long_suffix(call, row);
  const int num_rows = int(rows_.size());
  limit_ = std::min(limit_, kRowsCost);
  for (int i = 0, n; i < num_rows; i += n) {
    n = fitting(call, &rows_[i], num_rows - i, [&](int row) { return suffix_cost(call, row); });
    add(call, {nullptr, 0, 0, 0, &rows_[i], n, 0, kEveryRow, 0});
  }
}

void Schedule::find_nodes(const Call& call) {
  last_node_.assign(call.num_rows, kNone);
  node_begins_.assign(call.num_nodes, 0);
  apart_.assign(call.num_nodes, false);
  for (int node = 0; node < call.num_nodes; node++) {
    for (int i = call.node_row_offsets[node]; i < call.node_row_offsets[node + 1]; i++) {
      const int row = call.node_rows[i], parent = last_node_[row];
      node_begins_[node] = parent == kNone ? 0 : node_begins_[parent] + call.node_tokens[parent];
      last_node_[row] = node;
    }
  }
}

// Limits the cost of a piece, so that all threads finish at about the same time.
void Schedule::set_limit(const Call& call) {
  double total = 0;
  int num_units = 0;
  for (int node = 0; node < call.num_nodes; node++, num_units++) {
    int queries = 0;
    for (int i = call.node_row_offsets[node]; i < call.node_row_offsets[node + 1]; i++)
      queries += call.queries(call.node_rows[i]);
    total += cost_of(call.node_tokens[node], queries);
  }
  for (int row = 0; row < call.num_rows; row++) {
    total += suffix_cost(call, row);
    num_units += last_node_[row] == kNone;
  }
  total *= call.num_kv_heads;
  num_units *= call.num_kv_heads;
  const bool even = num_units % call.num_threads == 0 || num_units >= 8 * call.num_threads;
  limit_ = std::max(kLeastCost, total / (call.num_threads * (even ? 2 : 4)) * 1.01);
}

void Schedule::add_node(const Call& call, int node) {
  const int tokens = call.node_tokens[node], begin = node_begins_[node];
  const int32_t* rows = call.node_rows + call.node_row_offsets[node];
  const int num_rows = call.node_row_offsets[node + 1] - call.node_row_offsets[node];
  const int32_t* blocks = call.node_blocks + call.node_block_offsets[node];
  const int first = begin / call.block_size * call.block_size;
  const auto own = [&](int row) { return last_node_[row] == node ? suffix_cost(call, row) : 0; };
  std::vector<Piece> chunks;
  for (int i = 0, n; i < num_rows; i += n) {
    n = fitting(call, rows + i, num_rows - i, [](int) { return 0; });
    Piece piece{blocks, first, begin, begin + tokens, rows + i, n, 0, node, 0};
    double cost = 0;
    for (int j = 0; j < n; j++) {
      piece.num_queries += call.queries(rows[i + j]);
      cost += own(rows[i + j]);
    }
    if (cost + cost_of(tokens, piece.num_queries) > limit_) apart_[node] = true;
    chunks.push_back(piece);
  }
  for (Piece& piece : chunks) {
    if (!apart_[node]) {
      add(call, piece);
    } else {
      piece.ending = kNoRow;
      add_tokens(call, piece);
    }
  }
}

// Splits a long suffix into pieces for other threads, except its end with the query's own tokens.
void Schedule::add_long_suffix(const Call& call, int row) {
  const int begin = suffix_begins[row];
  const int seen_by_all = call.seq_lens[row] - call.query_tokens(row);
  const double cost = suffix_cost(call, row);
  if (cost <= limit_ || seen_by_all - begin < 2 * kFewestTokens) return;
  const int last = std::max<int>(kFewestTokens, (seen_by_all - begin) / std::ceil(cost / limit_));
  const int end = (seen_by_all - last) / kTile * kTile;
  if (end <= begin) return;
  // The pointer stays valid: rows_ does not grow any more.
  const int32_t* self = &*std::lower_bound(rows_.begin(), rows_.end(), row);
  const int32_t* blocks = call.block_table + row * call.block_table_stride;
  add_tokens(call, {blocks, 0, begin, end, self, 1, call.queries(row), kNoRow, 0});
  suffix_begins[row] = end;
}

void Schedule::add_tokens(const Call& call, const Piece& piece) {
  const double cost = cost_of(piece.end - piece.begin, piece.num_queries);
  const int even = int((piece.end - piece.begin) / std::ceil(cost / limit_));
  const int step = std::max(kFewestTokens, (even + kTile - 1) / kTile * kTile);
  for (int begin = piece.begin; begin < piece.end;) {
    Piece part = piece;
    part.begin = begin;
    // Cuts are at multiples of the tile size. A remainder smaller than a tile is not split off.
    const int end = (begin + step) / kTile * kTile;
    part.end = piece.end - end < kTile ? piece.end : end;
    add(call, part);
    begin = part.end;
  }
}

void Schedule::add(const Call& call, Piece piece) {
  const int number = int(pieces.size());
  bool partial = false;
  piece.num_queries = 0;
  for (int i = 0; i < piece.num_rows; i++) {
    const int row = piece.rows[i];
    if (!finishes(piece, row)) {
      shares.push_back({number, piece.num_queries, shares_of[row]});
      shares_of[row] = int(shares.size()) - 1;
      partial = true;
    }
    piece.num_queries += call.queries(row);
  }
  piece.partial = num_partials;
  if (partial)
    num_partials += size_t(call.num_kv_heads) * piece.num_queries * (call.head_size + 2);
  pieces.push_back(piece);
}

double Schedule::suffix_cost(const Call& call, int row) const {
  return cost_of(call.seq_lens[row] - suffix_begins[row], call.queries(row));
}

// Number of rows, at least one, that fit in one piece.
template <class Cost>
int Schedule::fitting(const Call& call, const int32_t* rows, int num_rows, Cost cost) const {
  int queries = 0;
  double sum = 0;
  for (int n = 0; n < num_rows; n++) {
    queries += call.queries(rows[n]);
    sum += cost(rows[n]);
    if (n > 0 && (queries * call.head_size > kMostFloats || sum > limit_)) return n;
  }
  return num_rows;
}
