"""Which blocks of a prompt are found by its own chain alone.

vLLM finds a block by a hash of its tokens, its salt and all before it. What is computed behind
placed tokens is not what those tokens would make it, so its hash has to say so.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

Hasher = Callable[[Any], list[bytes]]


def part_ways(request: Any, num_shared: int, chain: str) -> None:
    """Of a request that was not scheduled yet: its blocks from `num_shared` on are the chain's."""
    request._block_hasher = functools.partial(
        _hashes, hasher=request._block_hasher, num_shared=num_shared, chain=chain.encode()
    )
    request.block_hashes = []
    request.update_block_hashes()


def _hashes(request: Any, *, hasher: Hasher, num_shared: int, chain: bytes) -> list[bytes]:
    first = len(request.block_hashes)
    return [
        block_hash if index < num_shared else hashlib.sha256(block_hash + chain).digest()
        for index, block_hash in enumerate(hasher(request), start=first)
    ]
