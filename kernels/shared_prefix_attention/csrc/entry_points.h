// Entry points of a thread's work. Each is compiled separately with its instruction-set flags.
#pragma once
struct SharedState;

void run_avx2(SharedState& shared);
void run_avx512(SharedState& shared);
