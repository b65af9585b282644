// Worker loop of a thread: takes units until none is left. A unit is an item for one KV head.
#pragma once
#include <atomic>
#include <cmath>
#include <vector>

#include "tile_attention.h"
#include "work_items.h"

// State that the threads of one call share.
struct SharedState {
  const Call& call;
  const Schedule& schedule;
  float* partials;
  std::atomic<int> next{0};
  std::atomic<char>* done;  // by unit
};

// Thread-local buffer that is reused from call to call, page-aligned.
char* thread_buffer(size_t bytes);
void back_off(int times);

// Anonymous namespace: the code is compiled once per instruction set, and the linker must not merge
// the copies.
namespace {

template <class F>
class Worker {
  using Element = typename F::Element;
  using Weight = typename F::Weight;
  using Tiles = std::vector<Tile<Element>>;
  static constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

 public:
  explicit Worker(SharedState& shared)
      : state_(shared), call_(shared.call), schedule_(shared.schedule), size_(call_.head_size),
        heads_(call_.heads_per_kv()), memory_(memory()),
        attention_(size_, call_.block_size, call_.scale * kLog2E, memory_) {
    const int most = max_queries();
    accumulators_.outputs = reinterpret_cast<float*>(memory_ + TileAttention<F>::packed_bytes(size_));
    accumulators_.queries = reinterpret_cast<Weight*>(accumulators_.outputs + size_t(most) * size_);
    accumulators_.bases = reinterpret_cast<float*>(accumulators_.queries + size_t(most) * kQueryStride);
    accumulators_.sums = accumulators_.bases + most;
  }

  void run() {
    const int num_units = schedule_.num_units(call_);
    Tiles now, later;
    int unit = take(now);
    while (unit < num_units) {
      begin(unit);
      int next_unit = -1;
      for (size_t i = 0; i < now.size(); i++) {
        // The next unit is taken one tile early, so that its first tile can be prefetched.
        if (i + 1 == now.size()) next_unit = take(later);
        const Tile<Element>* ahead = i + 1 < now.size() ? &now[i + 1] : later.data();
        attention_.run(now[i], accumulators_, i + 1 == now.size() && later.empty() ? nullptr : ahead);
      }
      if (next_unit < 0) next_unit = take(later);
      finish(unit);
      now.swap(later);
      unit = next_unit;
    }
  }

 private:
  int max_queries() const {
    int most = 0;
    for (const WorkItem& item : schedule_.items) most = std::max(most, item.num_queries);
    return most;
  }

  char* memory() const {
    const size_t each = (size_ + 1 + F::kWidth) * sizeof(float) + kQueryStride * sizeof(Weight);
    return thread_buffer(TileAttention<F>::packed_bytes(size_) + max_queries() * each);
  }

  // Takes a unit and lists its tiles: the item's tokens, then suffixes of rows finishing in it.
  int take(Tiles& tiles) {
    const int unit = state_.next.fetch_add(1, std::memory_order_relaxed);
    tiles.clear();
    if (unit >= schedule_.num_units(call_)) return unit;
    const WorkItem& item = schedule_.items[unit / call_.num_kv_heads];
    const int kv_head = unit % call_.num_kv_heads;
    if (item.blocks)
      add_tiles(tiles, kv_head, item.blocks, item.first, item.begin, item.end, 0, item.num_queries, 0);
    for (int i = 0, query = 0; i < item.num_rows; i++) {
      const int row = item.rows[i], queries = call_.queries(row);
      if (queries && schedule_.finishes(item, row))
        add_tiles(tiles, kv_head, call_.block_table + row * call_.block_table_stride, 0,
             schedule_.suffix_begins[row], call_.seq_lens[row], query, queries, heads_);
      query += queries;
    }
    return unit;
  }

  void add_tiles(Tiles& tiles, int kv_head, const int32_t* blocks, int first, int begin, int end,
            int query, int num_queries, int causal_heads) {
    const Element* cache = static_cast<const Element*>(call_.cache) + kv_head * call_.head_stride;
    const int block_size = call_.block_size;
    const int visible_to_all = causal_heads ? end - (num_queries / causal_heads - 1) : end;
    for (int at = begin / kSubTile * kSubTile; at < end; at += kTile) {
      Tile<Element> tile;
      tile.low = std::max(begin - at, 0);
      tile.high = std::min(end - at, kTile);
      tile.tokens = (tile.high + kSubTile - 1) / kSubTile * kSubTile;
      tile.query = query;
      tile.num_queries = num_queries;
      tile.causal_heads = at + kTile > visible_to_all && visible_to_all < end ? causal_heads : 0;
      tile.end = end - at;
      for (int i = 0; i < tile.tokens; i += kSubTile) {
        const int place = at + i - first, offset = place % block_size;
        const Element* block = cache + blocks[place / block_size] * call_.block_stride;
        tile.keys[i / kSubTile] = block + offset;
        tile.values[i / kSubTile] = block + int64_t(block_size + offset) * size_;
      }
      tiles.push_back(tile);
    }
  }

  void begin(int unit) {
    const WorkItem& item = schedule_.items[unit / call_.num_kv_heads];
    const int first_head = unit % call_.num_kv_heads * heads_;
    Weight* to = accumulators_.queries;
    for (int i = 0; i < item.num_rows; i++)
      for (int t = call_.query_starts[item.rows[i]]; t < call_.query_starts[item.rows[i] + 1]; t++) {
        const Element* from = static_cast<const Element*>(call_.query) + t * call_.query_stride;
        for (int head = first_head; head < first_head + heads_; head++, to += kQueryStride)
          F::queries(from + head * size_, to, size_);
      }
    std::fill_n(accumulators_.outputs, size_t(item.num_queries) * size_, 0.f);
    std::fill_n(accumulators_.bases, item.num_queries, kNoScores);
    std::fill_n(accumulators_.sums, size_t(item.num_queries) * F::kWidth, 0.f);
  }

  void finish(int unit) {
    const WorkItem& item = schedule_.items[unit / call_.num_kv_heads];
    const int kv_head = unit % call_.num_kv_heads;
    for (int i = 0, query = 0; i < item.num_rows; i++) {
      const int row = item.rows[i], queries = call_.queries(row);
      if (schedule_.finishes(item, row)) {
        for (int at = schedule_.first_partial_of[row]; at >= 0; at = schedule_.partial_results[at].next)
          merge_partial(schedule_.partial_results[at], kv_head, query, queries);
        write(row, kv_head, query);
      } else {
        store_partials(item, kv_head, query, queries);
      }
      query += queries;
    }
    state_.done[unit].store(1, std::memory_order_release);
  }

  void store_partials(const WorkItem& item, int kv_head, int query, int num_queries) {
    float* to = state_.partials + schedule_.partial_of(item, call_, kv_head);
    float* bases = to + size_t(item.num_queries) * size_;
    std::copy_n(accumulators_.outputs + query * size_, num_queries * size_, to + query * size_);
    std::copy_n(accumulators_.bases + query, num_queries, bases + query);
    for (int m = query; m < query + num_queries; m++) bases[item.num_queries + m] = sum_of(m);
  }

  void merge_partial(const PartialResult& partial, int kv_head, int query, int num_queries) {
    const std::atomic<char>& done = state_.done[partial.item * call_.num_kv_heads + kv_head];
    for (int times = 0; !done.load(std::memory_order_acquire); times++) back_off(times);
    const WorkItem& item = schedule_.items[partial.item];
    const float* from = state_.partials + schedule_.partial_of(item, call_, kv_head);
    const float* bases = from + size_t(item.num_queries) * size_ + partial.query;
    const float* sums = bases + item.num_queries;
    from += partial.query * size_;
    for (int m = 0; m < num_queries; m++)
      merge(query + m, from + m * size_, bases[m], sums[m]);
  }

  void merge(int query, const float* outputs, float base, float sum) {
    const float highest = std::max(accumulators_.bases[query], base);
    const float ours = std::exp2(accumulators_.bases[query] - highest);
    const float theirs = std::exp2(base - highest);
    float* to = accumulators_.outputs + query * size_;
    for (int d = 0; d < size_; d++) to[d] = to[d] * ours + outputs[d] * theirs;
    float* const sums = accumulators_.sums + query * F::kWidth;
    for (int i = 0; i < F::kWidth; i++) sums[i] *= ours;
    sums[0] += sum * theirs;
    accumulators_.bases[query] = highest;
  }

  float sum_of(int query) const { return F::sum(F::load(accumulators_.sums + query * F::kWidth)); }

  void write(int row, int kv_head, int query) {
    for (int t = call_.query_starts[row]; t < call_.query_starts[row + 1]; t++)
      for (int head = kv_head * heads_; head < (kv_head + 1) * heads_; head++, query++) {
        // The sink is added once, after all nodes and the suffix.
        const float sink = call_.sinks ? call_.sinks[head] * kLog2E : kNoScores;
        const float base = accumulators_.bases[query], highest = std::max(base, sink);
        const bool empty = base == kNoScores;
        const float ours = std::exp2(base - highest);
        const float sum = (empty ? 0 : sum_of(query) * ours) + std::exp2(sink - highest);
        Element* to = static_cast<Element*>(call_.out) + t * call_.out_stride + head * size_;
        F::outputs(accumulators_.outputs + query * size_, empty ? 0 : ours / sum, to, size_);
        if (call_.lse)
          call_.lse[int64_t(t) * call_.num_heads + head] =
              highest == kNoScores ? -INFINITY : (highest + std::log2(sum)) * kLn2;
      }
  }

  SharedState& state_;
  const Call& call_;
  const Schedule& schedule_;
  const int size_, heads_;
  char* const memory_;
  TileAttention<F> attention_;
  Accumulators<F> accumulators_;
};

}  // namespace
