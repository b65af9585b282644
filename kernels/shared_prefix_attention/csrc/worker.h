// Worker loop of a thread: takes units until none is left. A unit is a piece for one KV head.
#pragma once
#include <atomic>
#include <cmath>
#include <vector>

#include "attention.h"
#include "schedule.h"

// State that the threads of one call share.
struct Shared {
  const Call& call;
  const Schedule& schedule;
  float* partials;
  std::atomic<int> next{0};
  std::atomic<char>* done;  // by unit
};

// Thread-local buffer that is reused from call to call, page-aligned.
char* kept_memory(size_t bytes);
void wait_a_little(int times);

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
  explicit Worker(Shared& shared)
      : shared_(shared), call_(shared.call), schedule_(shared.schedule), size_(call_.head_size),
        heads_(call_.heads_per_kv()), memory_(memory()),
        attend_(size_, call_.block_size, call_.scale * kLog2E, memory_) {
    const int most = most_queries();
    all_.outputs = reinterpret_cast<float*>(memory_ + Attend<F>::packed_bytes(size_));
    all_.queries = reinterpret_cast<Weight*>(all_.outputs + size_t(most) * size_);
    all_.bases = reinterpret_cast<float*>(all_.queries + size_t(most) * kQueryStride);
    all_.sums = all_.bases + most;
  }

  void run() {
    const int num_units = schedule_.num_units(call_);
    Tiles now, later;
    int unit = take(now);
    while (unit < num_units) {
      begin(unit);
      int following = -1;
      for (size_t i = 0; i < now.size(); i++) {
        // The next unit is taken one tile early, so that its first tile can be prefetched.
        if (i + 1 == now.size()) following = take(later);
        const Tile<Element>* ahead = i + 1 < now.size() ? &now[i + 1] : later.data();
        attend_.run(now[i], all_, i + 1 == now.size() && later.empty() ? nullptr : ahead);
      }
      if (following < 0) following = take(later);
      finish(unit);
      now.swap(later);
      unit = following;
    }
  }

 private:
  int most_queries() const {
    int most = 0;
    for (const Piece& piece : schedule_.pieces) most = std::max(most, piece.num_queries);
    return most;
  }

  char* memory() const {
    const size_t each = (size_ + 1 + F::kWidth) * sizeof(float) + kQueryStride * sizeof(Weight);
    return kept_memory(Attend<F>::packed_bytes(size_) + most_queries() * each);
  }

  // Takes a unit and lists its tiles: the piece's tokens, then suffixes of rows finishing in it.
  int take(Tiles& tiles) {
    const int unit = shared_.next.fetch_add(1, std::memory_order_relaxed);
    tiles.clear();
    if (unit >= schedule_.num_units(call_)) return unit;
    const Piece& piece = schedule_.pieces[unit / call_.num_kv_heads];
    const int kv_head = unit % call_.num_kv_heads;
    if (piece.blocks)
      list(tiles, kv_head, piece.blocks, piece.first, piece.begin, piece.end, 0, piece.num_queries, 0);
    for (int i = 0, query = 0; i < piece.num_rows; i++) {
      const int row = piece.rows[i], queries = call_.queries(row);
      if (queries && schedule_.finishes(piece, row))
        list(tiles, kv_head, call_.block_table + row * call_.block_table_stride, 0,
             schedule_.suffix_begins[row], call_.seq_lens[row], query, queries, heads_);
      query += queries;
    }
    return unit;
  }

  void list(Tiles& tiles, int kv_head, const int32_t* blocks, int first, int begin, int end,
            int query, int num_queries, int causal_heads) {
    const Element* cache = static_cast<const Element*>(call_.cache) + kv_head * call_.head_stride;
    const int block_size = call_.block_size;
    const int seen_by_all = causal_heads ? end - (num_queries / causal_heads - 1) : end;
    for (int at = begin / kSub * kSub; at < end; at += kTile) {
      Tile<Element> tile;
      tile.low = std::max(begin - at, 0);
      tile.high = std::min(end - at, kTile);
      tile.tokens = (tile.high + kSub - 1) / kSub * kSub;
      tile.query = query;
      tile.num_queries = num_queries;
      tile.causal_heads = at + kTile > seen_by_all && seen_by_all < end ? causal_heads : 0;
      tile.end = end - at;
      for (int i = 0; i < tile.tokens; i += kSub) {
        const int place = at + i - first, offset = place % block_size;
        const Element* block = cache + blocks[place / block_size] * call_.block_stride;
        tile.keys[i / kSub] = block + offset;
        tile.values[i / kSub] = block + int64_t(block_size + offset) * size_;
      }
      tiles.push_back(tile);
    }
  }

  void begin(int unit) {
    const Piece& piece = schedule_.pieces[unit / call_.num_kv_heads];
    const int first_head = unit % call_.num_kv_heads * heads_;
    Weight* to = all_.queries;
    for (int i = 0; i < piece.num_rows; i++)
      for (int t = call_.query_starts[piece.rows[i]]; t < call_.query_starts[piece.rows[i] + 1]; t++) {
        const Element* from = static_cast<const Element*>(call_.query) + t * call_.query_stride;
        for (int head = first_head; head < first_head + heads_; head++, to += kQueryStride)
          F::queries(from + head * size_, to, size_);
      }
    std::fill_n(all_.outputs, size_t(piece.num_queries) * size_, 0.f);
    std::fill_n(all_.bases, piece.num_queries, kNothing);
    std::fill_n(all_.sums, size_t(piece.num_queries) * F::kWidth, 0.f);
  }

  void finish(int unit) {
    const Piece& piece = schedule_.pieces[unit / call_.num_kv_heads];
    const int kv_head = unit % call_.num_kv_heads;
    for (int i = 0, query = 0; i < piece.num_rows; i++) {
      const int row = piece.rows[i], queries = call_.queries(row);
      if (schedule_.finishes(piece, row)) {
        for (int share = schedule_.shares_of[row]; share >= 0; share = schedule_.shares[share].next)
          add(schedule_.shares[share], kv_head, query, queries);
        write(row, kv_head, query);
      } else {
        leave(piece, kv_head, query, queries);
      }
      query += queries;
    }
    shared_.done[unit].store(1, std::memory_order_release);
  }

  void leave(const Piece& piece, int kv_head, int query, int num_queries) {
    float* to = shared_.partials + schedule_.partial_of(piece, call_, kv_head);
    float* bases = to + size_t(piece.num_queries) * size_;
    std::copy_n(all_.outputs + query * size_, num_queries * size_, to + query * size_);
    std::copy_n(all_.bases + query, num_queries, bases + query);
    for (int m = query; m < query + num_queries; m++) bases[piece.num_queries + m] = sum_of(m);
  }

  void add(const Share& share, int kv_head, int query, int num_queries) {
    const std::atomic<char>& done = shared_.done[share.piece * call_.num_kv_heads + kv_head];
    for (int times = 0; !done.load(std::memory_order_acquire); times++) wait_a_little(times);
    const Piece& piece = schedule_.pieces[share.piece];
    const float* from = shared_.partials + schedule_.partial_of(piece, call_, kv_head);
    const float* bases = from + size_t(piece.num_queries) * size_ + share.query;
    const float* sums = bases + piece.num_queries;
    from += share.query * size_;
    for (int m = 0; m < num_queries; m++)
      merge(query + m, from + m * size_, bases[m], sums[m]);
  }

  void merge(int query, const float* outputs, float base, float sum) {
    const float highest = std::max(all_.bases[query], base);
    const float ours = std::exp2(all_.bases[query] - highest), theirs = std::exp2(base - highest);
    float* to = all_.outputs + query * size_;
    for (int d = 0; d < size_; d++) to[d] = to[d] * ours + outputs[d] * theirs;
    float* const sums = all_.sums + query * F::kWidth;
    for (int i = 0; i < F::kWidth; i++) sums[i] *= ours;
    sums[0] += sum * theirs;
    all_.bases[query] = highest;
  }

  float sum_of(int query) const { return F::sum(F::load(all_.sums + query * F::kWidth)); }

  void write(int row, int kv_head, int query) {
    for (int t = call_.query_starts[row]; t < call_.query_starts[row + 1]; t++)
      for (int head = kv_head * heads_; head < (kv_head + 1) * heads_; head++, query++) {
        const bool empty = all_.bases[query] == kNothing;
        const float sum = sum_of(query);
        Element* to = static_cast<Element*>(call_.out) + t * call_.out_stride + head * size_;
        F::outputs(all_.outputs + query * size_, empty ? 0 : 1 / sum, to, size_);
        if (call_.lse)
          call_.lse[int64_t(t) * call_.num_heads + head] =
              empty ? -INFINITY : (all_.bases[query] + std::log2(sum)) * kLn2;
      }
  }

  Shared& shared_;
  const Call& call_;
  const Schedule& schedule_;
  const int size_, heads_;
  char* const memory_;
  Attend<F> attend_;
  Gathered<F> all_;
};

}  // namespace
