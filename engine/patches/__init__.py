"""Fixes of bugs in vLLM, one per file. Each has a test that fails without the fix."""
