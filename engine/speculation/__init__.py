"""Speculative decoding with drafts looked up in a store of generated tokens."""
