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
    """Of a request that does not run: its blocks from `num_shared` on are the chain's, which those
    from where an earlier call said are already. No token is read again: vLLM named the prompt's
    blocks when it made the request, each after the last, and the chain's names are made of those.
    """
    hasher, num_plain = request._block_hasher, len(request.block_hashes)
    if isinstance(hasher, functools.partial) and hasher.func is _hashes:
        hasher, num_plain = hasher.keywords["hasher"], hasher.keywords["num_shared"]
        assert num_shared <= num_plain, "what is the chain's stays the chain's"
    known = chain.encode()
    request._block_hasher = functools.partial(
        _hashes, hasher=hasher, num_shared=num_shared, chain=known
    )
    plain = request.block_hashes[num_shared:num_plain]
    request.block_hashes[num_shared:num_plain] = [_own(block_hash, known) for block_hash in plain]


def _hashes(request: Any, *, hasher: Hasher, num_shared: int, chain: bytes) -> list[bytes]:
    first = len(request.block_hashes)
    return [
        block_hash if index < num_shared else _own(block_hash, chain)
        for index, block_hash in enumerate(hasher(request), start=first)
    ]


def _own(block_hash: bytes, chain: bytes) -> bytes:
    return hashlib.sha256(block_hash + chain).digest()
