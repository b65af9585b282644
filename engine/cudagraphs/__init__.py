"""Planner of the CUDA graphs captured at startup within a memory budget; does not import torch."""
