"""Checksums of a slot's tensors, for whoever reads them over whatever transport.

xxh3 keeps up with memory, where zlib's crc32 would double the time of a fetch. It guards against
torn reads and reused memory, not against forgery.
"""

import xxhash

from service.prompt_kv.layout import Layout


def checksums(layout: Layout, data: memoryview) -> dict[str, str]:
    """By the tensors' names. Runs in a thread: hashing lets the event loop go on."""
    assert len(data) == layout.data_bytes, "these are not the layout's bytes"
    return {
        tensor.name: xxhash.xxh3_64_hexdigest(data[tensor.start : tensor.end])
        for tensor in layout.tensors()
    }


def etag(header: bytes) -> str:
    """Strong: the header holds the checksum of every tensor."""
    return f'"{xxhash.xxh3_128_hexdigest(header)}"'
