"""Checksums of a slot's tensors, valid for every transport.

xxh3 runs at memory bandwidth; zlib's crc32 would double the time of a fetch. The checksums detect
torn reads and reused memory, not forgery.
"""

import xxhash

from service.prompt_kv.layout import Layout


def checksums(layout: Layout, data: memoryview) -> dict[str, str]:
    """xxh3 digest of each tensor, by name. Runs in a thread: hashing releases the GIL."""
    assert len(data) == layout.data_bytes, "these are not the layout's bytes"
    return {
        tensor.name: xxhash.xxh3_64_hexdigest(data[tensor.start : tensor.end])
        for tensor in layout.tensors()
    }


def etag(header: bytes) -> str:
    """Strong ETag of the file: its header contains the checksum of every tensor."""
    return f'"{xxhash.xxh3_128_hexdigest(header)}"'
