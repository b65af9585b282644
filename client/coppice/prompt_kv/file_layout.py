"""Layout of a prompt-KV file, parsed from its safetensors header.

The server may be faulty or hostile, so the header is not trusted: the tensors must follow each
other without gaps, and keys and values of a layer must have the same shape.
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
    """Shape, byte range and checksum of one tensor in a prompt-KV file."""

    name: str
    shape: tuple[int, int, int]
    start: int
    end: int
    xxh3_64: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parsed header of a prompt-KV file: model, weights version, and the tensors' byte ranges.

    `parts` are in the order of the file. Shapes are [kv_heads, tokens, head_dim]. A layer with a
    sliding window has only the last ones of `num_tokens` tokens. `rope` is the rotary embedding
    applied to the keys.
    """

    model: str
    version: str
    dtype: Dtype
    num_layers: int
    num_tokens: int
    tokens_sha256: str
    rope: Mapping[str, Any]
    parts: tuple[TensorRange, ...]

    def layer(self, index: int) -> tuple[TensorRange, TensorRange]:
        named = {part.name: part for part in self.parts}
        return named[f"k.{index}"], named[f"v.{index}"]


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
    num_tokens = int(metadata["num_tokens"])
    parts = _parts_of(entries, len(header), num_tokens, json.loads(metadata["xxh3_64"]))
    if parts[-1].end != handle.num_bytes or num_tokens != handle.num_tokens:
        raise ValueError("the file does not have the size of its handle")
    if metadata["version"] != handle.version:
        raise ValueError(f"the file has version {metadata['version']}, not {handle.version}")
    return Layout(
        model=metadata["model"],
        version=metadata["version"],
        dtype=_DTYPES[entries["k.0"]["dtype"]][0],
        num_layers=len(names) // 2,
        num_tokens=num_tokens,
        tokens_sha256=metadata["tokens_sha256"],
        rope=cast(Mapping[str, Any], json.loads(metadata["rope"])),
        parts=parts,
    )


def _parts_of(
    entries: Mapping[str, Any], start: int, num_tokens: int, checksums: Mapping[str, str]
) -> tuple[TensorRange, ...]:
    """Tensors in the order of the file, the first of which is at the offset `start`."""
    code = entries["k.0"]["dtype"]
    _, item_bytes = _DTYPES[code]
    parts = []
    end = start
    for name in sorted(entries, key=lambda name: int(entries[name]["data_offsets"][0])):
        shape = heads, tokens, head_dim = _shape_of(entries[f"k.{name[2:]}"])
        first, end = end, end + heads * tokens * head_dim * item_bytes
        offsets = [first - start, end - start]
        if entries[name] != {"dtype": code, "shape": list(shape), "data_offsets": offsets}:
            raise ValueError(f"{name} does not follow the tensor before it")
        if tokens > num_tokens:
            raise ValueError(f"{name} has more tokens than the prompt")
        sum_of_tensor = str(checksums[name])
        parts.append(
            TensorRange(name=name, shape=shape, start=first, end=end, xxh3_64=sum_of_tensor)
        )
    return tuple(parts)


def _shape_of(entry: Mapping[str, Any]) -> tuple[int, int, int]:
    heads, tokens, head_dim = (int(size) for size in entry["shape"])
    if min(heads, tokens, head_dim) < 1:
        raise ValueError("a tensor is empty")
    return heads, tokens, head_dim
