"""Private block hashes of a chain, by vLLM's requests, against hashes computed from scratch."""

import hashlib
import itertools
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from engine.kv_transfer.core.load_planner import privatize_blocks

BLOCK = 16
CHAIN = "chain"
PROMPT = [(11 * i) % 500 for i in range(100)]
RESPONSE = [(7 * i) % 500 for i in range(40)]


@pytest.fixture(scope="module", autouse=True)
def first_parent() -> None:
    init_none_hash(sha256)


def request(
    prompt: list[int] = PROMPT, *, salt: str | None = "salt", hasher: Any = None
) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=64),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=hasher or get_request_block_hasher(BLOCK, sha256),
    )


def read_anew(
    num_public_blocks: int, prompt: list[int] = PROMPT, salt: str | None = "salt"
) -> list[bytes]:
    """Block hashes computed from all tokens. The first `num_public_blocks` are shared."""
    plain: list[bytes] = list(request(prompt, salt=salt).block_hashes)
    own = [hashlib.sha256(name + CHAIN.encode()).digest() for name in plain]
    return plain[:num_public_blocks] + own[num_public_blocks:]


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 96, 100])
@pytest.mark.parametrize("salt", [None, "salt"])
def test_prompt_block_hashes_equal_those_computed_from_scratch(
    num_tokens: int, salt: str | None
) -> None:
    """However often, and from whatever position, blocks are declared private."""
    prompt, num_blocks = PROMPT[:num_tokens], num_tokens // BLOCK
    for num, fewer, fewest in itertools.combinations_with_replacement(range(num_blocks, -1, -1), 3):
        found = request(prompt, salt=salt)
        for num_public_blocks in (num, fewer, fewest):
            privatize_blocks(found, num_public_blocks, CHAIN)
            assert found.block_hashes == read_anew(num_public_blocks, prompt, salt)


@pytest.mark.parametrize("num_said", [0, 5, 12, 40])
@pytest.mark.parametrize(("num_public_blocks", "fewer"), [(6, 6), (6, 4), (5, 0), (0, 0)])
def test_response_blocks_are_private_even_if_begun_before(
    num_said: int, num_public_blocks: int, fewer: int
) -> None:
    """As of a sample that was preempted and waits again."""
    found = request()
    privatize_blocks(found, num_public_blocks, CHAIN)
    found.append_output_token_ids(RESPONSE[:num_said])
    privatize_blocks(found, fewer, CHAIN)
    found.append_output_token_ids(RESPONSE[num_said:])
    assert found.block_hashes[: len(PROMPT) // BLOCK] == read_anew(fewer)
    plain = request(PROMPT + RESPONSE).block_hashes
    assert len(found.block_hashes) == len(plain) == len(set(found.block_hashes))
    assert not set(found.block_hashes[fewer:]) & set(plain)


def test_no_token_is_hashed_twice() -> None:
    reads, plain = [], get_request_block_hasher(BLOCK, sha256)

    def counting(found: Request) -> list[Any]:
        reads.append(found.num_tokens - BLOCK * len(found.block_hashes))
        return list(plain(found))

    found = request(hasher=counting)
    for num_public_blocks in (6, 4, 0):
        privatize_blocks(found, num_public_blocks, CHAIN)
    found.append_output_token_ids(RESPONSE)
    assert reads == [len(PROMPT), len(PROMPT) % BLOCK + len(RESPONSE)]


def test_private_blocks_stay_private() -> None:
    found = request()
    privatize_blocks(found, 2, CHAIN)
    with pytest.raises(AssertionError, match="cannot become public"):
        privatize_blocks(found, 3, CHAIN)
