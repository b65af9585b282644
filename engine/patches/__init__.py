"""Fixes of upstream bugs, one per file. Each has a test that fails without it."""
