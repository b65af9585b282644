"""Plan of the CUDA graphs captured at startup within a memory budget. No module imports torch."""
