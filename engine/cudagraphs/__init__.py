"""Choice of the CUDA graphs to capture at startup within a memory budget; no torch import."""
