#include "work_items.h"

#include <algorithm>
#include <cmath>

namespace {
// The unit of cost is one query times one token. Packing a token costs as much as kPacking queries.
constexpr double kPacking = 12;
constexpr double kMinCost = 4096;
// The KV heads of a block are adjacent in memory, and so are their page-table entries. Items of
// rows without a node are small enough that these entries are still cached for the next KV head.
constexpr double kMaxRowsCost = 4 * kMinCost;
// The accumulated outputs of an item's queries must fit in the core's cache.
constexpr int kMaxFloats = 32 * 1024;
constexpr int kMinTokens = 256, kTile = 128;

double cost_of(int tokens, int queries) { return tokens * (queries + kPacking); }
}  // namespace

void Schedule::build(const Call& call) {
  items.clear();
  partial_results.clear();
  num_partials = 0;
  first_partial_of.assign(call.num_rows, kNone);
  suffix_begins.assign(call.suffix_starts, call.suffix_starts + call.num_rows);
  find_nodes(call);
  set_max_cost(call);
  for (int node = 0; node < call.num_nodes; node++) add_node(call, node);

  rows_.clear();
  for (int row = 0; row < call.num_rows; row++)
    if (last_node_[row] == kNone || is_split_[last_node_[row]]) rows_.push_back(row);
  for (int row : rows_) add_long_suffix(call, row);
  const int num_rows = int(rows_.size());
  max_cost_ = std::min(max_cost_, kMaxRowsCost);
  for (int i = 0, n; i < num_rows; i += n) {
    n = num_fitting_rows(call, &rows_[i], num_rows - i, [&](int row) { return suffix_cost(call, row); });
    add(call, {nullptr, 0, 0, 0, &rows_[i], n, 0, kAllRows, 0});
  }
}

void Schedule::find_nodes(const Call& call) {
  last_node_.assign(call.num_rows, kNone);
  node_begins_.assign(call.num_nodes, 0);
  is_split_.assign(call.num_nodes, false);
  for (int node = 0; node < call.num_nodes; node++) {
    for (int i = call.node_row_offsets[node]; i < call.node_row_offsets[node + 1]; i++) {
      const int row = call.node_rows[i], parent = last_node_[row];
      node_begins_[node] = parent == kNone ? 0 : node_begins_[parent] + call.node_tokens[parent];
      last_node_[row] = node;
    }
  }
}

// Limits the cost of an item, so that all threads finish at about the same time.
void Schedule::set_max_cost(const Call& call) {
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
  max_cost_ = std::max(kMinCost, total / (call.num_threads * (even ? 2 : 4)) * 1.01);
}

void Schedule::add_node(const Call& call, int node) {
  const int tokens = call.node_tokens[node], begin = node_begins_[node];
  const int32_t* rows = call.node_rows + call.node_row_offsets[node];
  const int num_rows = call.node_row_offsets[node + 1] - call.node_row_offsets[node];
  const int32_t* blocks = call.node_blocks + call.node_block_offsets[node];
  const int first = begin / call.block_size * call.block_size;
  const auto own = [&](int row) { return last_node_[row] == node ? suffix_cost(call, row) : 0; };
  std::vector<WorkItem> chunks;
  for (int i = 0, n; i < num_rows; i += n) {
    n = num_fitting_rows(call, rows + i, num_rows - i, [](int) { return 0; });
    WorkItem item{blocks, first, begin, begin + tokens, rows + i, n, 0, node, 0};
    double cost = 0;
    for (int j = 0; j < n; j++) {
      item.num_queries += call.queries(rows[i + j]);
      cost += own(rows[i + j]);
    }
    if (cost + cost_of(tokens, item.num_queries) > max_cost_) is_split_[node] = true;
    chunks.push_back(item);
  }
  for (WorkItem& item : chunks) {
    if (!is_split_[node]) {
      add(call, item);
    } else {
      item.finishing_node = kNoRows;
      add_tokens(call, item);
    }
  }
}

// Splits a long suffix into items for other threads, except its end with the query's own tokens.
void Schedule::add_long_suffix(const Call& call, int row) {
  const int begin = suffix_begins[row];
  const int visible_to_all = call.seq_lens[row] - call.query_tokens(row);
  const double cost = suffix_cost(call, row);
  if (cost <= max_cost_ || visible_to_all - begin < 2 * kMinTokens) return;
  const int last = std::max<int>(kMinTokens, (visible_to_all - begin) / std::ceil(cost / max_cost_));
  const int end = (visible_to_all - last) / kTile * kTile;
  if (end <= begin) return;
  // The pointer stays valid: rows_ does not grow any more.
  const int32_t* self = &*std::lower_bound(rows_.begin(), rows_.end(), row);
  const int32_t* blocks = call.block_table + row * call.block_table_stride;
  add_tokens(call, {blocks, 0, begin, end, self, 1, call.queries(row), kNoRows, 0});
  suffix_begins[row] = end;
}

void Schedule::add_tokens(const Call& call, const WorkItem& item) {
  const double cost = cost_of(item.end - item.begin, item.num_queries);
  const int even = int((item.end - item.begin) / std::ceil(cost / max_cost_));
  const int step = std::max(kMinTokens, (even + kTile - 1) / kTile * kTile);
  for (int begin = item.begin; begin < item.end;) {
    WorkItem part = item;
    part.begin = begin;
    // Cuts are at multiples of the tile size. A remainder smaller than a tile is not split off.
    const int end = (begin + step) / kTile * kTile;
    part.end = item.end - end < kTile ? item.end : end;
    add(call, part);
    begin = part.end;
  }
}

void Schedule::add(const Call& call, WorkItem item) {
  const int number = int(items.size());
  bool partial = false;
  item.num_queries = 0;
  for (int i = 0; i < item.num_rows; i++) {
    const int row = item.rows[i];
    if (!finishes(item, row)) {
      partial_results.push_back({number, item.num_queries, first_partial_of[row]});
      first_partial_of[row] = int(partial_results.size()) - 1;
      partial = true;
    }
    item.num_queries += call.queries(row);
  }
  item.partial = num_partials;
  if (partial)
    num_partials += size_t(call.num_kv_heads) * item.num_queries * (call.head_size + 2);
  items.push_back(item);
}

double Schedule::suffix_cost(const Call& call, int row) const {
  return cost_of(call.seq_lens[row] - suffix_begins[row], call.queries(row));
}

// Number of rows, at least one, that fit in one item.
template <class Cost>
int Schedule::num_fitting_rows(const Call& call, const int32_t* rows, int num_rows, Cost cost) const {
  int queries = 0;
  double sum = 0;
  for (int n = 0; n < num_rows; n++) {
    queries += call.queries(rows[n]);
    sum += cost(rows[n]);
    if (n > 0 && (queries * call.head_size > kMaxFloats || sum > max_cost_)) return n;
  }
  return num_rows;
}
