"""Supports of sampled tokens: the sets of token ids that they were sampled from."""
