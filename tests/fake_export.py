"""KV exports of the fake engine: bytes that encode token, position and weights version."""

import os
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.types.kv import ExportSlot, ExportStatus, KvFormat

FORMAT = KvFormat(
    num_layers=2,
    num_kv_heads=2,
    head_dim=32,
    dtype="float32",
    rope={"rope_type": "default", "rope_theta": 10000.0},
)


def fake_kv(tokens: Sequence[int], version: str) -> npt.NDArray[np.float32]:
    """[layers, keys and values, kv_heads, tokens, head_dim]: the canonical layout."""
    shape = (FORMAT.num_layers, 2, FORMAT.num_kv_heads, len(tokens), FORMAT.head_dim)
    places = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 1024
    of_tokens = np.asarray(tokens, dtype=np.float32)[:, None]
    of_version = zlib.crc32(version.encode()) % 1000
    return (places + of_tokens + of_version).astype(np.float32)


def write_export(slot: ExportSlot, prompt: Sequence[int], version: str, word: ExportStatus) -> None:
    """Writes bytes only for a COMMITTED status.

    As with a worker, the export fails if the slot is outside the file or the mount is full.
    """
    data = fake_kv(prompt[: slot.num_tokens], version).tobytes()
    with slot.arena.open("r+b", buffering=0) as file:
        size = file.seek(0, 2)
        if slot.offset + len(data) > size:
            word = ExportStatus.FAILED
        if word == ExportStatus.COMMITTED and not _written(file.fileno(), slot.offset, data):
            word = ExportStatus.FAILED
        if slot.status_offset + 8 <= size:
            _written(file.fileno(), slot.status_offset, word.to_bytes(8, "little"))


def _written(file: int, offset: int, data: bytes) -> bool:
    try:
        os.posix_fallocate(file, offset, len(data))
    except OSError:
        return False
    return os.pwrite(file, data, offset) == len(data)
