"""Speculative decoding with drafts from generated tokens: proposal, length, verification."""
