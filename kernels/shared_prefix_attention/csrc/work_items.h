// Schedule of a call: its items, that is queries and positions, and the item that finishes a row.
#pragma once
#include <cstddef>
#include <vector>

#include "call.h"

// Attention of the queries of `rows` over positions [begin, end) in `blocks`, which start at
// position `first`; once per KV head. If a row finishes in this item, its suffix is processed, the
// partial results of earlier items are merged, and its output is written. For other rows the item
// stores partial results.
struct WorkItem {
  const int32_t* blocks;
  int first, begin, end;
  const int32_t* rows;
  int num_rows, num_queries;
  int finishing_node;  // rows whose last node this is finish here; or kAllRows, kNoRows
  size_t partial;      // offset of its partial results, in floats
};

// Location of partial results of a row. A linked list, because a row has few.
struct PartialResult {
  int item, query, next;
};

class Schedule {
 public:
  static constexpr int kAllRows = -1, kNoRows = -2, kNone = -1;

  // Items wait only for earlier items and are taken in order, so there is no deadlock.
  void build(const Call& call);

  bool finishes(const WorkItem& item, int row) const {
    const int node = item.finishing_node;
    return node == kAllRows || (node >= 0 && last_node_[row] == node);
  }
  int num_units(const Call& call) const { return int(items.size()) * call.num_kv_heads; }
  // Offset of the outputs of an item's queries, followed by their bases and their sums.
  size_t partial_of(const WorkItem& item, const Call& call, int kv_head) const {
    return item.partial + size_t(kv_head) * item.num_queries * (call.head_size + 2);
  }

  std::vector<WorkItem> items;
  std::vector<PartialResult> partial_results;
  std::vector<int> first_partial_of;  // per row, its first partial result
  std::vector<int> suffix_begins;     // per row, start of the positions read by the finishing item
  size_t num_partials;                // floats

 private:
  void find_nodes(const Call& call);
  void set_max_cost(const Call& call);
  void add_node(const Call& call, int node);
  void add_long_suffix(const Call& call, int row);
  void add_tokens(const Call& call, const WorkItem& item);
  void add(const Call& call, WorkItem item);
  double suffix_cost(const Call& call, int row) const;
  template <class Cost>
  int num_fitting_rows(const Call& call, const int32_t* rows, int num_rows, Cost cost) const;

  double max_cost_;  // maximum cost of an item
  std::vector<int> last_node_, node_begins_;
  std::vector<char> is_split_;  // nodes whose rows finish in a separate item
  std::vector<int32_t> rows_;
};
