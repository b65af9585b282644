"""Shared-prefix attention inside vLLM: who shares what, whether it pays, and the backends."""
