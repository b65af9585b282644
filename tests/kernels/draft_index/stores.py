"""Shorthands for steps of a draft store."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from kernels.draft_index.store_protocol import DraftBatch, Int32Array, Store


def array(values: Sequence[int]) -> Int32Array:
    return np.array(values, np.int32)


def run_step(store: Store, rows: dict[int, Sequence[int]], limit: int = 16) -> DraftBatch:
    """Each slot gets its tokens, and a draft."""
    return store.step(
        array(list(rows)),
        array([len(tokens) for tokens in rows.values()]),
        array([token for tokens in rows.values() for token in tokens]),
        array([limit] * len(rows)),
    )


def draft(drafted: DraftBatch, row: int = 0) -> list[int]:
    found: list[int] = drafted.tokens[row, : drafted.lengths[row]].tolist()
    return found


def assert_alike(one: DraftBatch, other: DraftBatch) -> None:
    for field in fields(DraftBatch):
        np.testing.assert_array_equal(
            getattr(one, field.name), getattr(other, field.name), err_msg=field.name
        )
