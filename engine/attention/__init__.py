"""Shared-prefix attention for vLLM: prefix grouping, kernel choice, CPU and GPU backends."""
