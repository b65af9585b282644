"""Parameters of drafting, passed to the compiled store when it is created.

They were tuned on recorded rollouts: docs/decisions/2026-11-20-drafts.md.
"""

MAX_DRAFT_TOKENS = 32
"""Upper bound of `max_draft_tokens`."""

MAX_MATCH_LENGTH = 32
"""Match lengths are capped at this number of tokens."""

ORDERS = (4, 2, 1)
"""n-gram orders of the index of one prompt's texts, looked up from the longest."""
MAX_LOOKUPS = 24
"""Maximum number of the latest occurrences of an n-gram that are examined."""
MAX_VOTES = 16
"""Maximum number of matches in one prompt's texts that vote."""
MIN_VOTES = 4
"""Shorter orders are looked up only while fewer matches than this were found."""

MISMATCH_BELOW = 8
"""If no match has this length, the last token may be a mismatch in an otherwise similar text, so
the ORDERS[0] tokens before it are looked up as well."""
MAX_MISMATCH_VOTES = 8
"""Maximum number of matches from that lookup that vote."""

ALL_ORDER = 6
"""n-gram order of the index of finished responses to any prompt."""
ALL_MAX_VOTES = 8
ALL_MIN_VOTES = 4
"""Responses to other prompts are searched only if the same prompt has fewer matches than this."""

MAX_FINISHED_TEXTS = 128
"""Maximum number of finished responses stored per prompt."""
MAX_TEXTS = 2048
"""Maximum number of texts per prompt, including the prompt itself."""
MAX_TEXT_TOKENS = 2**21

AGE_SHIFT = 2
"""A vote's weight is divided by 1 + age / 2**AGE_SHIFT."""


def weight(match_length: int, age: int) -> int:
    """Vote weight of a match, in fixed point."""
    return (match_length * match_length << 16) // ((1 << AGE_SHIFT) + age)


def position_weight(distance: int) -> int:
    """Factor on the vote of another response to the prompt, by the distance of the positions.

    `distance` is in tokens: 8 up to 4 tokens, 4 up to 16, 2 up to 64, then 1.
    """
    return 8 >> min(3, max(0, (max(distance - 1, 0).bit_length() - 1) // 2))


# Bytes charged against `max_bytes`: upper bounds of what tables and vectors take after growth.
PROMPT_BYTES = 1024
TEXT_BYTES = 160
TOKEN_BYTES = 104
LOG_TOKEN_BYTES = 64
LOG_SHARE = 4
"""The log of responses to any prompt gets 1 / LOG_SHARE of `max_bytes`."""


def log_tokens(max_bytes: int) -> int:
    """Capacity in tokens of the log of finished responses, a power of two."""
    return 1 << max(6, (max_bytes // LOG_SHARE // LOG_TOKEN_BYTES).bit_length() - 1)
