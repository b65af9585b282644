"""An export arena as the service owns one: preallocated, with canary bytes around every slot."""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.types.kv import ExportSlot, ExportStatus, KvFormat

ALIGNMENT = 64
CANARY = 0xA5
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class TestArena:
    """A bump allocator of export slots; `check` asserts that no byte between slots was written."""

    __test__ = False

    def __init__(
        self, path: Path, form: KvFormat, *, num_bytes: int = 2**22, num_ranks: int = 1
    ) -> None:
        self.path, self.form, self._num_ranks = path, form, num_ranks
        self._free, self._held = ALIGNMENT, np.zeros(num_bytes, dtype=bool)
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        self.bytes = np.memmap(path, dtype=np.uint8, mode="r+")
        self.bytes[:] = CANARY

    def slot(self, num_tokens: int) -> ExportSlot:
        words = self._take(8 * self._num_ranks)
        self.bytes[words : words + 8 * self._num_ranks] = 0
        offset = self._take(self.num_bytes(num_tokens))
        return ExportSlot(
            arena=self.path, offset=offset, status_offset=words, num_tokens=num_tokens
        )

    def num_bytes(self, num_tokens: int) -> int:
        layers = map(self.form.layer, range(self.form.num_layers))
        values = sum(
            2 * layer.num_kv_heads * (num_tokens - layer.first_token(num_tokens)) * layer.head_dim
            for layer in layers
        )
        return values * ITEM_BYTES[self.form.dtype]

    def words(self, slot: ExportSlot) -> list[ExportStatus]:
        end = slot.status_offset + 8 * self._num_ranks
        stored = self.bytes[slot.status_offset : end].view("<u8")
        return [ExportStatus(int(status)) for status in stored]

    def data(self, slot: ExportSlot) -> npt.NDArray[np.uint8]:
        """A copy of the slot's current bytes."""
        end = slot.offset + self.num_bytes(slot.num_tokens)
        return np.array(self.bytes[slot.offset : end])

    def first_tokens(self, slot: ExportSlot, num_tokens: int) -> npt.NDArray[np.uint8]:
        """The first `num_tokens` tokens of every layer and head, as [.., tokens, bytes]."""
        size = self.form.head_dim * ITEM_BYTES[self.form.dtype]
        return self.data(slot).reshape(-1, slot.num_tokens, size)[:, :num_tokens]

    def untouched(self, slot: ExportSlot) -> bool:
        return bool((self.data(slot) == CANARY).all())

    def check(self) -> None:
        assert (self.bytes[~self._held] == CANARY).all(), "written outside the slots"

    def _take(self, num_bytes: int) -> int:
        start = self._free
        assert start + num_bytes < len(self.bytes), "the test's arena is full"
        self._held[start : start + num_bytes] = True
        self._free = -(-(start + num_bytes + 1) // ALIGNMENT) * ALIGNMENT
        return start
