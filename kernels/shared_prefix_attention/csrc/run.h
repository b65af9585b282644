// Entry points of a thread's work. Each is compiled separately with its instruction-set flags.
#pragma once
struct Shared;

void run_avx2(Shared& shared);
void run_avx512(Shared& shared);
