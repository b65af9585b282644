"""Parameters of a group (one prompt and its samples), and the seeds of its samples."""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from coppice.wire.columns.token_columns import TokenLists
from engine.types.chat import ChatResponse
from engine.types.samples import SampleRequest, Sampling

Decode = Callable[[Sequence[int], int | str | None, Sampling], Awaitable[str]]
"""Detokenizes a response, given its token ids, its stop reason and its sampling parameters."""

Parse = Callable[[Sequence[int], int | str | None, Sampling], Awaitable[ChatResponse]]
"""Splits a response to messages into its content, reasoning and tool calls; see `Decode`."""


TEMPLATE = SampleRequest(id="", prompt_token_ids=(), sampling=Sampling(max_tokens=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Prompt, sampling parameters and limits of one group (one prompt and its samples).

    `GroupFactory` makes them from the request, its prompt, and what was resolved for it. `template`
    has what all engine requests of a group have in common. With `stream_tokens`, tokens are
    received while samples run. With `answers_top_logprobs`, the top logprobs are part of the
    samples' answers. With `support_vocab_size`, the size of the vocabulary, supports are returned.
    After `deadline_seconds` the group ends with the samples as they are. Its first samples resume
    those in `continued`. `num_required` is the number of samples after which the finish policy ends
    the group. `seeds` has one seed per sample. With `echo` the answer has the prompt's token ids. A
    group that was suspended resumes all its samples; `num_given_tokens` are then the numbers of
    tokens that `continue_from` gave, without those sampled before the suspension.
    """

    owner: str = ""
    exact_version: str | None = None
    adapter: str | None = None
    template: SampleRequest = TEMPLATE
    stream_tokens: bool = False
    answers_top_logprobs: bool = False
    support_vocab_size: int | None = None
    returns_routed_experts: bool = False
    id: str = ""
    index: int = 0
    n: int = 1
    prompt_token_ids: list[int] = field(default_factory=list)
    num_images: int = 0
    sampling: Sampling = Sampling(max_tokens=1)
    seed: int | None = None
    num_required: int | None = None
    deadline_seconds: float | None = None
    seeds: Sequence[int] | None = None
    decode: Decode | None = None
    parse: Parse | None = None
    echo: bool = False
    kv_lease_seconds: float | None = None
    continued: Sequence[TokenLists] = ()
    num_given_tokens: Sequence[int] | None = None


def given_tokens(options: GroupOptions) -> Sequence[int]:
    """Number of tokens of each first sample of the group that `continue_from` gave."""
    if options.num_given_tokens is not None:
        return options.num_given_tokens
    return [len(sample.token_ids) for sample in options.continued]


def num_given(options: GroupOptions, index: int) -> int:
    """Number of tokens of a sample that `continue_from` gave; 0 for other samples."""
    numbers = given_tokens(options)
    return numbers[index] if index < len(numbers) else 0


def sample_seed(options: GroupOptions, index: int) -> int | None:
    """Seed of a sample's random numbers.

    A sample of `continue_from` has another one than in its first run, so that its numbers are not
    repeated. A sample that was suspended has the same.
    """
    number = num_given(options, index)
    if options.seeds is not None:
        seed = options.seeds[index]
        return derive_seed(seed, f"+{number}") if number else seed
    if options.seed is None:
        return None
    resumed = f"+{number}" if number else ""
    return derive_seed(options.seed, f"{index}{resumed}")


def derive_seed(seed: int, stream_key: int | str) -> int:
    """Derive the seed of one random stream by hashing the request's seed with a stream key.

    Adding them would make groups with neighbouring seeds share random streams.
    """
    digest = hashlib.blake2b(f"{seed}:{stream_key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
