"""Supports (sets of token ids that sampling could choose): memory limits and decoding.

The engine returns them encoded (`coppice.wire.columns.support`).
"""

import asyncio
from collections.abc import Sequence

from coppice.wire.columns.support import Support, rows_of
from coppice.wire.rollouts import UnfinishedSample
from coppice.wire.sampling import Sampling
from engine.types.info import EngineInfo
from service.errors import InvalidRequest
from service.rollouts.request import NewGroup, NewRollout

DECODED_IN_LOOP = 2**14
"""Length of the base64 of supports that are decoded on the event loop."""


def support_of(rows: Sequence[bytes] | None, vocab_size: int | None) -> Support | None:
    """Supports of an engine's completion; None if they were not requested."""
    if vocab_size is None:
        return None
    assert rows is not None, "the engine returns the supports that were requested"
    known: dict[bytes, bytes] = {}
    return Support(tuple(known.setdefault(row, row) for row in rows), vocab_size)


def check(
    request: NewRollout,
    prompts: Sequence[Sequence[int]],
    info: EngineInfo,
    *,
    max_bytes: int,
    max_kept_bytes: int | None,
) -> int:
    """Maximum memory of a request's supports; refuses a request if it exceeds `max_bytes`.

    `max_kept_bytes`: memory for the results of finished rollouts, if this result is kept. Answers
    have supports in base64, and the segments of a tree are kept in the log, too.
    """
    if not request.return_support:
        return 0
    num_bytes = _check_bytes(request, prompts, info, max_bytes, "limits.max_support_bytes")
    if max_kept_bytes is not None:
        kept = max_kept_bytes * 3 // 4
        setting = "3/4 of limits.keep_answers_bytes"
        _check_bytes(request, prompts, info, kept, setting, segment_copies=2)
    return num_bytes


def _check_bytes(
    request: NewRollout,
    prompts: Sequence[Sequence[int]],
    info: EngineInfo,
    max_bytes: int,
    setting: str,
    *,
    segment_copies: int = 1,
) -> int:
    num_tokens = sum(
        _max_tokens(request, group, info.max_context_tokens - len(prompt), segment_copies)
        for group, prompt in zip(request.groups, prompts, strict=True)
    )
    per_token = max_row_bytes(request.sampling, info)
    if num_tokens * per_token > max_bytes:
        raise InvalidRequest(
            f"return_support may take {num_tokens * per_token} bytes, for {num_tokens} tokens with "
            f"sets of up to {per_token} bytes; the limit is {max_bytes} ({setting}). "
            "Set sampling.top_k, or request fewer tokens"
        )
    return num_tokens * per_token


def max_row_bytes(sampling: Sampling, info: EngineInfo) -> int:
    """Maximum size of an encoded support, in bytes.

    vLLM may exclude two tokens per bad word: the word with and without a space before it.
    """
    bitmap, per_id = (info.vocab_size + 7) // 8, (info.vocab_size.bit_length() + 6) // 7
    limits = [] if sampling.allowed_token_ids is None else [len(sampling.allowed_token_ids)]
    if sampling.temperature and sampling.top_k:
        limits.append(sampling.top_k)
    truncated = sampling.temperature and (sampling.top_p < 1.0 or sampling.min_p > 0.0)
    if not (limits or truncated or sampling.structured_outputs):
        stops = len(info.eos_token_ids) + len(sampling.stop_token_ids)
        limits.append(2 * len(sampling.bad_words) + (stops if sampling.min_tokens else 0))
    return 1 + min([bitmap, *(number * per_id for number in limits)])


def _max_tokens(request: NewRollout, group: NewGroup, room: int, segment_copies: int) -> int:
    """Maximum number of tokens of a group for which the answer has supports."""
    length = min(request.sampling.max_tokens or room, room)
    tree = request.branching
    if tree is None:
        return group.n * length
    flattened = tree.max_leaves * length if tree.flatten else 0
    in_segments = min(tree.max_leaves * length, tree.max_new_tokens_total)
    return segment_copies * in_segments + flattened


async def given_support(
    sample: UnfinishedSample, *, wanted: bool, vocab_size: int
) -> Support | None:
    """Supports of the tokens that a resumed sample already has.

    Refuses a sample whose supports are missing, unwanted or inconsistent. Large ones are decoded in
    a thread, because it would block the event loop.
    """
    given = sample.support
    if (given is not None) != wanted:
        raise InvalidRequest(
            "continue_from needs the support of each sample if return_support is true, "
            "and only then"
        )
    if given is None:
        return None
    if len(given.lengths) != len(sample.token_ids) or given.vocab_size != vocab_size:
        raise InvalidRequest(
            f"continue_from needs one support per token, of a vocabulary of {vocab_size}"
        )
    try:
        if len(given.data) <= DECODED_IN_LOOP:
            return Support(tuple(rows_of(given)), vocab_size)
        return Support(tuple(await asyncio.to_thread(rows_of, given)), vocab_size)
    except ValueError as error:
        raise InvalidRequest(f"continue_from: {error}") from error
