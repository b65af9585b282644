"""Speculative decoding with drafts from a group's tokens: proposal, draft length, verification."""
