"""Which blocks of a prompt are found by its own chain alone.

vLLM finds a block by a hash of its tokens, its salt and all before it. What is computed behind
placed tokens is not what those tokens would make it, so its hash has to say so. And a load may fail
after vLLM has given its blocks their names, so nothing that is loaded has a name that others know.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

Hasher = Callable[[Any], list[bytes]]


def part_ways(request: Any, num_shared: int, chain: str) -> None:
    """Of a request that does not run: its blocks from `num_shared` on are the chain's. The last
    call counts."""
    hasher = request._block_hasher
    if isinstance(hasher, functools.partial) and hasher.func is _hashes:
        hasher = hasher.keywords["hasher"]
    request._block_hasher = functools.partial(
        _hashes, hasher=hasher, num_shared=num_shared, chain=chain.encode()
    )
    request.block_hashes = []
    request.update_block_hashes()


def _hashes(request: Any, *, hasher: Hasher, num_shared: int, chain: bytes) -> list[bytes]:
    first = len(request.block_hashes)
    return [
        block_hash if index < num_shared else hashlib.sha256(block_hash + chain).digest()
        for index, block_hash in enumerate(hasher(request), start=first)
    ]
