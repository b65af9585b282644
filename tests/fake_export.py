"""KV exports of the fake engine: bytes that encode token, position and weights version."""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.kv_types import ExportSlot, ExportStatus, KvFormat

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
    """Writes bytes only for a COMMITTED status, and none for a slot outside the file."""
    data = fake_kv(prompt[: slot.num_tokens], version).tobytes()
    with slot.arena.open("r+b") as file:
        size = file.seek(0, 2)
        if slot.offset + len(data) > size:
            word = ExportStatus.FAILED
        if word == ExportStatus.COMMITTED:
            file.seek(slot.offset)
            file.write(data)
        if slot.status_offset + 8 <= size:
            file.seek(slot.status_offset)
            file.write(word.to_bytes(8, "little"))
