"""Layout of a prompt-KV file, parsed from its safetensors header.

The server may be faulty or hostile, so the header is not trusted: every tensor must have its
offsets in the canonical layout.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import ValidationError

from coppice.errors import BadAnswer
from coppice.wire.kv import KvHandle

LENGTH_BYTES = 8
Dtype = Literal["float32", "bfloat16", "float16"]
_DTYPES: dict[str, tuple[Dtype, int]] = {
    "F32": ("float32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """Byte range and checksum of one tensor in a prompt-KV file."""

    name: str
    start: int
    end: int
    xxh3_64: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parsed header of a prompt-KV file: model, weights version, and the tensors' byte ranges.

    `shape` is [kv_heads, tokens, head_dim]. `rope` is the rotary embedding applied to the keys.
    """

    model: str
    version: str
    dtype: Dtype
    num_layers: int
    shape: tuple[int, int, int]
    tokens_sha256: str
    rope: Mapping[str, Any]
    parts: tuple[TensorRange, ...]

    def layer(self, index: int) -> tuple[TensorRange, TensorRange]:
        return self.parts[2 * index], self.parts[2 * index + 1]


def header_bytes(first: bytes, handle: KvHandle) -> int:
    """Size of a prompt-KV file's header, length field included, from the file's first 8 bytes."""
    num_bytes = LENGTH_BYTES + int.from_bytes(first, "little")
    if num_bytes > handle.num_bytes:
        raise BadAnswer("the prompt KV's header is longer than its file")
    return num_bytes


def read_layout(file: memoryview, handle: KvHandle) -> Layout:
    """Parses the header of a whole prompt-KV file. Raises BadAnswer unless it fits the handle."""
    num_bytes = header_bytes(bytes(file[:LENGTH_BYTES]), handle)
    return layout_of(bytes(file[:num_bytes]), handle)


def layout_of(header: bytes, handle: KvHandle) -> Layout:
    """Parses the header of a prompt-KV file. Raises BadAnswer unless it fits the handle."""
    try:
        return _layout_of(header, handle)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise BadAnswer(f"the prompt KV's header is invalid: {error!r}") from error


def _layout_of(header: bytes, handle: KvHandle) -> Layout:
    entries = json.loads(header[LENGTH_BYTES:])
    metadata = entries.pop("__metadata__")
    names = [f"{kind}.{layer}" for layer in range(len(entries) // 2) for kind in "kv"]
    if entries.keys() != set(names) or not names:
        raise ValueError("the tensors are not k.0, v.0 and so on")
    code, shape = entries["k.0"]["dtype"], entries["k.0"]["shape"]
    dtype, item_bytes = _DTYPES[code]
    heads, tokens, head_dim = (int(size) for size in shape)
    tensor_bytes = heads * tokens * head_dim * item_bytes
    sums = json.loads(metadata["xxh3_64"])
    parts = []
    for index, name in enumerate(names):
        offsets = [index * tensor_bytes, (index + 1) * tensor_bytes]
        if entries[name] != {"dtype": code, "shape": shape, "data_offsets": offsets}:
            raise ValueError(f"{name} is not at its canonical offset")
        start, end = (len(header) + offset for offset in offsets)
        parts.append(TensorRange(name=name, start=start, end=end, xxh3_64=str(sums[name])))
    if parts[-1].end != handle.num_bytes or tokens != handle.num_tokens:
        raise ValueError("the file does not have the size of its handle")
    if metadata["version"] != handle.version:
        raise ValueError(f"the file has version {metadata['version']}, not {handle.version}")
    return Layout(
        model=metadata["model"],
        version=metadata["version"],
        dtype=dtype,
        num_layers=len(names) // 2,
        shape=(heads, tokens, head_dim),
        tokens_sha256=metadata["tokens_sha256"],
        rope=cast(Mapping[str, Any], json.loads(metadata["rope"])),
        parts=tuple(parts),
    )
