// Acceptance probability of drafted tokens, estimated from the outcomes of earlier drafts.
// calibration.py is the reference.
#pragma once
#include <algorithm>
#include <cstdint>

constexpr int kScopes = 4, kMatches = 8, kPositions = 6, kAgreements = 8, kBins = 20;
constexpr int kCells = kScopes * kAgreements * kMatches * kPositions;
constexpr int kCoarseCells = kScopes * kAgreements;
constexpr uint32_t kFull = 1 << 12, kCoarseFull = 1 << 16;
constexpr double kLean = 8;

class Calibration {
 public:
  static int cell(int scope, int matched, int agreeing, int total, int position) {
    const int coarse = scope * kAgreements + agreement(agreeing, total);
    return (coarse * kMatches + over({3, 4, 6, 9, 13, 20, 32}, matched)) * kPositions +
           over({1, 2, 3, 5, 9}, position);
  }

  float probability(int cell) const {
    const int coarse = cell / (kMatches * kPositions);
    const double prior = (coarse_came[coarse] + 0.5 * kLean) / (coarse_tried[coarse] + kLean);
    return float((came[cell] + prior * kLean) / (tried[cell] + kLean));
  }

  void learn(int cell, float probability, bool success) {
    const int coarse = cell / (kMatches * kPositions);
    count(tried[cell], came[cell], success, kFull);
    count(coarse_tried[coarse], coarse_came[coarse], success, kCoarseFull);
    const int bin = coarse / kAgreements * kBins + std::min(int(probability * kBins), kBins - 1);
    foretold_tried[bin]++;
    foretold_came[bin] += success;
    foretold[bin] += probability;
  }

  uint32_t tried[kCells] = {}, came[kCells] = {};
  uint32_t coarse_tried[kCoarseCells] = {}, coarse_came[kCoarseCells] = {};
  int64_t foretold_tried[kScopes * kBins] = {}, foretold_came[kScopes * kBins] = {};
  double foretold[kScopes * kBins] = {};

 private:
  template <int n>
  static int over(const int (&bounds)[n], int value) {
    int number = 0;
    for (const int bound : bounds) number += value >= bound;
    return number;
  }
  // Bin of an agreement: split votes by their share, unanimous votes by their number.
  static int agreement(int agreeing, int total) {
    if (agreeing < total) return 2 * agreeing < total ? 0 : 4 * agreeing < 3 * total ? 1 : 2;
    return 3 + over({2, 3, 5, 9}, total);
  }
  // Counts are halved when full, so that old outcomes lose weight.
  static void count(uint32_t& tried, uint32_t& came, bool success, uint32_t full) {
    came += success;
    if (++tried == full) tried /= 2, came /= 2;
  }
};
