"""Patches of bugs and of slow paths in vLLM, one per module. Each has a test.

The test of a bug fails without the patch. That of a slow path compares with vLLM's own code.
"""
