"""Decode steps of one attention layer that are timed on a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from engine.attention.crossover import BatchShape
from engine.attention.cuda_calibration import CalibrationStep, LayerGeometry

HEAD_SIZE: Final = 128
BLOCK_SIZES: Final = (16, 64, 128)
HEADS: Final = ((16, 8), (32, 8))
NUM_SPLITS: Final = (1, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of a decode step that share prefixes in groups."""

    groups: int
    rows: int
    prefix: int
    suffix: int = 128

    @property
    def name(self) -> str:
        return f"{self.groups}x{self.rows}@{self.prefix}"

    def table(self, block_size: int) -> Any:
        shape = BatchShape(
            num_groups=self.groups,
            group_size=self.rows,
            prefix_blocks=self.prefix // block_size,
            suffix_tokens=self.suffix,
        )
        return shape.block_table(block_size)

    def lens(self) -> Any:
        return np.full(self.groups * self.rows, self.prefix + self.suffix, np.int32)


SHARED: Final = (
    Batch(groups=16, rows=16, prefix=1024),
    Batch(groups=16, rows=16, prefix=4096),
    Batch(groups=8, rows=8, prefix=512),
    Batch(groups=64, rows=8, prefix=2048),
)
INDEPENDENT: Final = (
    Batch(groups=256, rows=1, prefix=1024),
    Batch(groups=16, rows=1, prefix=4096),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Measured variant. `num_splits` 0 is FlashAttention's choice."""

    batch: Batch
    heads: tuple[int, int] = HEADS[0]
    block_size: int = BLOCK_SIZES[0]
    layout: str = "NHD"
    num_splits: int = 0


def variants() -> Iterator[Variant]:
    """The shapes that decide first: the time limit may end the list."""
    for batch in (*SHARED, *INDEPENDENT):
        for heads in HEADS:
            yield Variant(batch=batch, heads=heads)
    for size in BLOCK_SIZES[1:]:
        for heads in HEADS:
            for batch in (INDEPENDENT[0], *SHARED[:2]):
                yield Variant(batch=batch, heads=heads, block_size=size)
    for batch in (*INDEPENDENT, SHARED[0]):
        yield Variant(batch=batch, layout="HND")
        for splits in NUM_SPLITS:
            yield Variant(batch=batch, num_splits=splits)


class Step(CalibrationStep):
    """A calibration step with another layout of the cache or another number of splits."""

    def __init__(self, variant: Variant, device: torch.device, flash: Any) -> None:
        heads, kv_heads = variant.heads
        geometry = LayerGeometry(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=HEAD_SIZE,
            block_size=variant.block_size,
            dtype=torch.bfloat16,
            fa_version=flash.get_flash_attn_version(head_size=HEAD_SIZE),
        )
        if variant.num_splits:
            flash = SimpleNamespace(
                flash_attn_varlen_func=partial(
                    flash.flash_attn_varlen_func, num_splits=variant.num_splits
                ),
                get_scheduler_metadata=partial(
                    flash.get_scheduler_metadata, num_splits=variant.num_splits
                ),
            )
        batch = variant.batch
        super().__init__(geometry, batch.table(variant.block_size), batch.lens(), device, flash)
        if variant.layout == "HND":
            # A head's tokens of a block are in one piece of memory.
            self.cache = self.cache.transpose(1, 2).contiguous().transpose(1, 2)

    @property
    def geometry(self) -> LayerGeometry:
        return self._geometry

    def distinct_bytes(self) -> int:
        """Bytes of the cache, each of which at least one row reads."""
        return self.cache.nbytes

    def read_bytes(self) -> int:
        """Bytes that all rows read without sharing."""
        tokens = int(self._lens.sum())
        return tokens * self.cache[0, 0].nbytes
