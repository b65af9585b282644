"""Byte layout of exported prompt KV: status words of the ranks, then a safetensors file.

    words     one page: an `ExportStatus` per rank, written by the engine; not part of the file
    header    8 bytes of length, then JSON, padded with spaces to whole pages
    tensors   k.0 v.0 k.1 v.1 .., each [kv_heads, tokens, head_dim], without padding

If layers have different shapes or sliding windows, layers of one kind are adjacent. A layer with a
window has only the last tokens.

The header has the same length in every entry of a server: an entry is reserved before the checksums
are known, and the weights version may change while a prompt is queued.

Checksums are valid for every transport. They detect torn reads and reused memory, not forgery. xxh3
runs at memory bandwidth; zlib's crc32 would double the time of a fetch.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from coppice.safetensors_io import CODES, FLOAT_BYTES, TensorEntry, header_of
from coppice.wire.prompt_kv import KvLayerShape
from engine.types.kv import KvFormat
from service.kv.arena import round_up_to_pages
from service.kv.store import data_bytes

NO_CHECKSUM = "0" * 16
LONGEST_VERSION = "v" * 64
MAX_TOKENS = 10**7


def tokens_sha256(token_ids: Sequence[int]) -> str:
    """SHA-256 of token ids as little-endian int32, which identifies the prompt of exported KV."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of exported KV: the first `num_tokens` tokens of a prompt, one weights version."""

    model: str
    version: str
    format: KvFormat
    num_tokens: int
    tokens_sha256: str
    header_bytes: int

    def shape(self, layer: int) -> tuple[int, int, int]:
        """Shape of a layer's keys, and of its values."""
        layer_format = self.format.layer(layer)
        num_tokens = self.num_tokens - layer_format.first_token(self.num_tokens)
        return layer_format.num_kv_heads, num_tokens, layer_format.head_dim

    @property
    def data_bytes(self) -> int:
        return data_bytes(self.format, self.num_tokens)

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.data_bytes

    def tensors(self) -> Iterator[TensorEntry]:
        """Tensors in order; their offsets are relative to the start of the first one."""
        dtype = CODES[self.format.dtype]
        start = 0
        for layer in self.format.storage_order():
            shape = self.shape(layer)
            for kind in "kv":
                end = start + FLOAT_BYTES[dtype] * math.prod(shape)
                yield TensorEntry(
                    name=f"{kind}.{layer}", dtype=dtype, shape=shape, start=start, end=end
                )
                start = end

    def header(self, checksums: Mapping[str, str]) -> bytes:
        metadata = self._metadata(checksums)
        return header_of(self.tensors(), metadata, min_bytes=self.header_bytes)

    def _metadata(self, checksums: Mapping[str, str]) -> dict[str, str]:
        """Metadata of the safetensors header; mappings are JSON, as values must be strings."""
        return {
            "model": self.model,
            "version": self.version,
            "num_tokens": str(self.num_tokens),
            "tokens_sha256": self.tokens_sha256,
            "rope": json.dumps(dict(self.format.rope)),
            "exact": "true",
            "xxh3_64": json.dumps(dict(checksums)),
        }


class LayoutFactory:
    """Creates the layouts of exported KV for one model and KV format."""

    def __init__(self, model: str, kv_format: KvFormat) -> None:
        self._model = model
        self._form = kv_format
        self._header_bytes = 0
        self._header_bytes = self._longest_header_bytes()

    def of(self, token_ids: Sequence[int], version: str) -> Layout:
        return self._layout(version, len(token_ids), tokens_sha256(token_ids))

    def _longest_header_bytes(self) -> int:
        longest = self._layout(LONGEST_VERSION, MAX_TOKENS, "0" * 64)
        sums = {tensor.name: NO_CHECKSUM for tensor in longest.tensors()}
        # A window may have a few more tokens in a shorter prompt: one more digit in three numbers.
        margin = 3 * len(sums) if self._form.layers else 0
        return round_up_to_pages(len(longest.header(sums)) + margin)

    def _layout(self, version: str, num_tokens: int, digest: str) -> Layout:
        return Layout(
            model=self._model,
            version=version,
            format=self._form,
            num_tokens=num_tokens,
            tokens_sha256=digest,
            header_bytes=self._header_bytes,
        )


def checksums(layout: Layout, data: memoryview) -> dict[str, str]:
    """xxh3 digest of each tensor, by name; run it in a thread, as hashing releases the GIL."""
    assert len(data) == layout.data_bytes, "the data has another length than the layout"
    return {
        tensor.name: xxhash.xxh3_64_hexdigest(data[tensor.start : tensor.end])
        for tensor in layout.tensors()
    }


def etag(header: bytes) -> str:
    """Strong ETag of a KV file, from its header, which has the checksum of every tensor."""
    return f'"{xxhash.xxh3_128_hexdigest(header)}"'


def layer_shapes(layout: Layout) -> list[KvLayerShape] | None:
    """Shapes of all layers; None if they are the same and have all tokens."""
    return [
        KvLayerShape(
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            first_token=layer.first_token(layout.num_tokens),
        )
        for layer in layout.format.layers
    ] or None
