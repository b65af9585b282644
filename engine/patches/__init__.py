"""Patches of bugs in vLLM, one per module. Each has a test that fails without the patch."""
