"""Argument validation shared by the compiled store and its Python reference."""

from hashlib import blake2b

import numpy as np

from kernels.draft_index import params
from kernels.draft_index.errors import InvalidCall
from kernels.draft_index.interface import Int32Array


def hash_key(name: bytes) -> int:
    """64-bit key of a name. Collisions are assumed not to happen."""
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def check_begin(prompt: Int32Array) -> None:
    _check_array("prompt", prompt)
    if not 0 < len(prompt) < params.MAX_TEXT_TOKENS:
        raise InvalidCall(
            f"a prompt has 1 to {params.MAX_TEXT_TOKENS - 1} tokens, not {len(prompt)}"
        )
    _check_tokens(prompt)


def check_step(
    slots: Int32Array, counts: Int32Array, tokens: Int32Array, limits: Int32Array
) -> None:
    """Check the arrays of a step, except that the slots exist, which the store checks."""
    for name, array in (
        ("slots", slots),
        ("counts", counts),
        ("tokens", tokens),
        ("limits", limits),
    ):
        _check_array(name, array)
    if not len(slots) == len(counts) == len(limits):
        raise InvalidCall(
            f"{len(slots)} slots, {len(counts)} counts and {len(limits)} limits: one each a row"
        )
    if len(slots) and min(int(counts.min()), int(limits.min())) < 0:
        raise InvalidCall("a count or a limit is below zero")
    if int(counts.sum(dtype=np.int64)) != len(tokens):
        raise InvalidCall(f"the counts come to {int(counts.sum())}, there are {len(tokens)} tokens")
    _check_tokens(tokens)


def _check_array(name: str, array: Int32Array) -> None:
    if array.dtype != np.int32 or array.ndim != 1:
        raise InvalidCall(f"{name}: one row of int32, not {array.ndim} dimensions of {array.dtype}")


def _check_tokens(tokens: Int32Array) -> None:
    if len(tokens) and int(tokens.min()) < 0:
        raise InvalidCall(f"{int(tokens.min())} is no token")
