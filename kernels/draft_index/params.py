"""The figures that make the drafts what they are; the compiled store is given them when it is made.

They were chosen on recorded rollouts: docs/decisions/2026-11-20-drafts.md.
"""

MAX_DRAFT_TOKENS = 32
"""The most that `max_draft_tokens` may be."""

MAX_MATCH_LENGTH = 32
"""Places are told apart by how many tokens before them match, up to so many."""

ORDERS = (4, 2, 1)
"""Contexts of a prompt's texts are looked up by so many last tokens, the longer ones first."""
MAX_LOOKUPS = 24
"""So many of the latest places of a context are looked at,"""
MAX_VOTES = 16
"""so many of a prompt's have a say, and"""
MIN_VOTES = 4
"""with so many found behind a longer context a shorter one is not looked up."""

MISMATCH_BELOW = 8
"""Where no place matches by so many tokens, the last token is taken for a slip as well: places are
looked up by the ORDERS[0] tokens before it,"""
MAX_MISMATCH_VOTES = 8
"""and so many have a say."""

ALL_ORDER = 6
"""Finished responses to any prompt are looked up by so many tokens."""
ALL_MAX_VOTES = 8
ALL_MIN_VOTES = 4
"""With so many places of the same prompt found others are not looked at."""

MAX_FINISHED_TEXTS = 128
"""Finished responses that are kept of one prompt."""
MAX_TEXTS = 2048
"""Texts of one prompt, its own included."""
MAX_TEXT_TOKENS = 2**21

AGE_SHIFT = 2
"""A vote's weight is divided by 1 + age / 2**AGE_SHIFT."""


def weight(match_length: int, age: int) -> int:
    """Of the vote of one place."""
    return (match_length * match_length << 16) // ((1 << AGE_SHIFT) + age)


def position_weight(distance: int) -> int:
    """By what a vote is multiplied when another response to the prompt says it so many tokens
    earlier or later: 8 up to 4 tokens, 4 up to 16, 2 up to 64."""
    return 8 >> min(3, max(0, (max(distance - 1, 0).bit_length() - 1) // 2))


# What is charged against `max_bytes`: the most that tables and vectors take when they have grown.
PROMPT_BYTES = 1024
TEXT_BYTES = 160
TOKEN_BYTES = 104
LOG_TOKEN_BYTES = 64
LOG_SHARE = 4
"""One part in so many of `max_bytes` is for the responses to any prompt."""


def log_tokens(max_bytes: int) -> int:
    """Of finished responses to any prompt that are remembered: a power of two."""
    return 1 << max(6, (max_bytes // LOG_SHARE // LOG_TOKEN_BYTES).bit_length() - 1)
