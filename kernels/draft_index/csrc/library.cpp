// C interface of the library, called by store.py.
#include "draft_store.h"

// The exported symbols.
#pragma GCC visibility push(default)
extern "C" {

int coppice_drafts_version() { return 2; }

Store* coppice_drafts_create(const Params* params) { return new Store(*params); }
void coppice_drafts_destroy(Store* store) { delete store; }

int32_t coppice_drafts_begin(Store* store, uint64_t group, uint64_t key, const int32_t* prompt,
                             int32_t length) {
  return store->begin(group, key, prompt, length);
}
int32_t coppice_drafts_end(Store* store, int32_t slot, int32_t keep) { return store->end(slot, keep); }
void coppice_drafts_age(Store* store) { store->age(); }
int32_t coppice_drafts_step(Store* store, Step* step) { return store->step(*step); }

int64_t coppice_drafts_charge(const Store* store) { return store->charge(); }
int64_t coppice_drafts_num_tokens(const Store* store) { return store->num_tokens(); }
int64_t coppice_drafts_bytes(const Store* store) { return store->bytes(); }

void coppice_drafts_reliability(const Store* store, int64_t* tried, int64_t* accepted,
                                double* predicted) {
  const AcceptanceEstimate& estimate = store->estimate();
  std::copy(estimate.bin_tried, estimate.bin_tried + kScopes * kBins, tried);
  std::copy(estimate.bin_accepted, estimate.bin_accepted + kScopes * kBins, accepted);
  std::copy(estimate.bin_predicted, estimate.bin_predicted + kScopes * kBins, predicted);
}

}  // extern "C"
#pragma GCC visibility pop
