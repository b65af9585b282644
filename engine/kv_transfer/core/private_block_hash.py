"""Block hashes that only the requests of one chain match.

vLLM finds a block by a hash of its tokens, its salt and all blocks before it. KV computed after
spliced spans differs from the exact KV of the same tokens, so its hash must differ. A load may also
fail after vLLM has assigned hashes to its blocks, so loaded blocks must not match other requests.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

Hasher = Callable[[Any], list[bytes]]


def privatize_blocks(request: Any, num_public_blocks: int, chain: str) -> None:
    """Make the blocks of a waiting request from `num_public_blocks` on private to the chain.

    A later call may only lower `num_public_blocks`. No token is hashed again: the private hashes
    are derived from the hashes that vLLM computed when it created the request.
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
