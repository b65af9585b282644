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


def privatize_blocks(request: Any, num_public_blocks: int, chain: str) -> None:
    """Of a request that does not run: its blocks from `num_public_blocks` on are the chain's, which
    those
    from where an earlier call said are already. No token is read again: vLLM named the prompt's
    blocks when it made the request, each after the last, and the chain's names are made of those.
    """
    hasher, num_plain = request._block_hasher, len(request.block_hashes)
    if isinstance(hasher, functools.partial) and hasher.func is _block_hashes:
        hasher, num_plain = hasher.keywords["hasher"], hasher.keywords["num_public_blocks"]
        assert num_public_blocks <= num_plain, "what is the chain's stays the chain's"
    known = chain.encode()
    request._block_hasher = functools.partial(
        _block_hashes, hasher=hasher, num_public_blocks=num_public_blocks, chain=known
    )
    plain = request.block_hashes[num_public_blocks:num_plain]
    request.block_hashes[num_public_blocks:num_plain] = [
        _private_hash(block_hash, known) for block_hash in plain
    ]


def _block_hashes(
    request: Any, *, hasher: Hasher, num_public_blocks: int, chain: bytes
) -> list[bytes]:
    first = len(request.block_hashes)
    return [
        block_hash if index < num_public_blocks else _private_hash(block_hash, chain)
        for index, block_hash in enumerate(hasher(request), start=first)
    ]


def _private_hash(block_hash: bytes, chain: bytes) -> bytes:
    return hashlib.sha256(block_hash + chain).digest()
