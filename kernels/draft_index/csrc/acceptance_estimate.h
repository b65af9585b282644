// Acceptance probability of drafted tokens, estimated from the outcomes of earlier drafts.
// acceptance_estimate.py is the reference.
#pragma once
#include <algorithm>
#include <cstdint>

constexpr int kScopes = 4, kMatchBins = 8, kPositionBins = 6, kAgreements = 8, kBins = 20;
constexpr int kCells = kScopes * kAgreements * kMatchBins * kPositionBins;
constexpr int kCoarseCells = kScopes * kAgreements;
constexpr uint32_t kMaxCount = 1 << 12, kMaxCoarseCount = 1 << 16;
constexpr double kPriorWeight = 8;

class AcceptanceEstimate {
 public:
  static int cell(int scope, int match_length, int num_agreeing, int total, int position) {
    const int coarse = scope * kAgreements + agreement(num_agreeing, total);
    return (coarse * kMatchBins + bin_of({3, 4, 6, 9, 13, 20, 32}, match_length)) * kPositionBins +
           bin_of({1, 2, 3, 5, 9}, position);
  }

  float probability(int cell) const {
    const int coarse = cell / (kMatchBins * kPositionBins);
    const double prior =
        (coarse_accepted[coarse] + 0.5 * kPriorWeight) / (coarse_tried[coarse] + kPriorWeight);
    return float((accepted[cell] + prior * kPriorWeight) / (tried[cell] + kPriorWeight));
  }

  void update(int cell, float probability, bool success) {
    const int coarse = cell / (kMatchBins * kPositionBins);
    count(tried[cell], accepted[cell], success, kMaxCount);
    count(coarse_tried[coarse], coarse_accepted[coarse], success, kMaxCoarseCount);
    const int bin = coarse / kAgreements * kBins + std::min(int(probability * kBins), kBins - 1);
    bin_tried[bin]++;
    bin_accepted[bin] += success;
    bin_predicted[bin] += probability;
  }

  uint32_t tried[kCells] = {}, accepted[kCells] = {};
  uint32_t coarse_tried[kCoarseCells] = {}, coarse_accepted[kCoarseCells] = {};
  int64_t bin_tried[kScopes * kBins] = {}, bin_accepted[kScopes * kBins] = {};
  double bin_predicted[kScopes * kBins] = {};

 private:
  template <int n>
  static int bin_of(const int (&bounds)[n], int value) {
    int number = 0;
    for (const int bound : bounds) number += value >= bound;
    return number;
  }
  // Bin of an agreement: split votes by their share, unanimous votes by their number.
  static int agreement(int num_agreeing, int total) {
    if (num_agreeing < total) return 2 * num_agreeing < total ? 0 : 4 * num_agreeing < 3 * total ? 1 : 2;
    return 3 + bin_of({2, 3, 5, 9}, total);
  }
  // Counts are halved at `max_count`, so that old outcomes lose weight.
  static void count(uint32_t& tried, uint32_t& accepted, bool success, uint32_t max_count) {
    accepted += success;
    if (++tried == max_count) tried /= 2, accepted /= 2;
  }
};
