"""Shared-prefix attention in vLLM: grouping of rows, choice of the faster kernel, backends."""
