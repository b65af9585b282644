// A thread's work with one instruction set, each compiled on its own with the flags for it.
#pragma once
struct Shared;

void run_avx2(Shared& shared);
void run_avx512(Shared& shared);
