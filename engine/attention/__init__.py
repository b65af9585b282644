"""Shared-prefix attention inside vLLM: grouping of rows, crossover model and attention backends."""
