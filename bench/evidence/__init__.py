"""Measurements of `bench.gpu_evidence`, each run in a process of its own."""
