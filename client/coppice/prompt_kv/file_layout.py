"""Parser of the header of a prompt-KV file: byte range and shape of each layer's tensors.

The server may be faulty or hostile, so the header is not trusted: the tensors must follow each
other without gaps, and keys and values of a layer must have the same shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic_core import from_json

from coppice.errors import BadAnswer
from coppice.safetensors_io import LENGTH_BYTES, TensorEntry, head_bytes, parse_header
from coppice.wire.prompt_kv import KvHandle

Dtype = Literal["float32", "bfloat16", "float16"]
_DTYPES: Mapping[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange(TensorEntry):
    """Shape, byte range and checksum of one tensor in a prompt-KV file."""

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
    num_bytes = head_bytes(first)
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
    except (ValueError, KeyError, TypeError) as error:
        raise BadAnswer(f"the prompt KV's header is invalid: {error!r}") from error


def _layout_of(header: bytes, handle: KvHandle) -> Layout:
    parsed = parse_header(header)
    metadata, tensors = parsed.metadata, parsed.tensors
    names = [f"{kind}.{layer}" for layer in range(len(tensors) // 2) for kind in "kv"]
    if tensors.keys() != set(names) or not names:
        raise ValueError("the tensors are not k.0, v.0 and so on")
    num_tokens = int(metadata["num_tokens"])
    parts = _parts_of(tensors, num_tokens, from_json(metadata["xxh3_64"]))
    if parts[-1].end != handle.num_bytes or num_tokens != handle.num_tokens:
        raise ValueError("the file does not have the size of its handle")
    if metadata["version"] != handle.version:
        raise ValueError(f"the file has version {metadata['version']}, not {handle.version}")
    return Layout(
        model=metadata["model"],
        version=metadata["version"],
        dtype=_DTYPES[parts[0].dtype],
        num_layers=len(names) // 2,
        num_tokens=num_tokens,
        tokens_sha256=metadata["tokens_sha256"],
        rope=cast(Mapping[str, Any], from_json(metadata["rope"])),
        parts=parts,
    )


def _parts_of(
    tensors: Mapping[str, TensorEntry], num_tokens: int, checksums: Mapping[str, str]
) -> tuple[TensorRange, ...]:
    """Tensors in the order of the file."""
    dtype = tensors["k.0"].dtype
    parts = []
    for name, tensor in tensors.items():
        keys = tensors[f"k.{name[2:]}"]
        if (tensor.dtype, tensor.shape) != (dtype, keys.shape):
            raise ValueError(f"{name} differs from other tensors in dtype or shape")
        _, tokens, _ = tensor.shape
        if not tensor.num_bytes:
            raise ValueError("a tensor is empty")
        if tokens > num_tokens:
            raise ValueError(f"{name} has more tokens than the prompt")
        parts.append(
            TensorRange(
                name=name,
                dtype=dtype,
                shape=tensor.shape,
                start=tensor.start,
                end=tensor.end,
                xxh3_64=str(checksums[name]),
            )
        )
    return tuple(parts)
