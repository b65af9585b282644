"""Fixes of upstream bugs, one file each. Every one has a test that fails without it."""
