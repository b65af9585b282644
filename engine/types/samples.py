"""Data types of the engine interface: sampling requests, logprobs, completions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from engine.types.kv import ExportSlot, KvLoad

PauseMode = Literal["abort", "wait", "keep"]
ActivationMode = Literal["keep", "recompute", "wait", "abort"]
SleepLevel = Literal[1, 2]
"""Level of vLLM's sleep mode: 1 keeps the weights in host memory, 2 drops them."""
SleepTag = Literal["weights", "kv_cache"]
"""Part of the engine's memory, with vLLM's name."""
WEIGHTS: Final[SleepTag] = "weights"
KV_CACHE: Final[SleepTag] = "kv_cache"
EngineFinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Constraint on a response's text, of exactly one kind. `json` is the text of a JSON schema.

    Without `enable_in_reasoning` it begins after the reasoning that the engine's parser finds.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    enable_in_reasoning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters and stop conditions, with the names of vLLM's SamplingParams.

    `stop` strings are matched against the text of the response, without special tokens if
    `skip_special_tokens`. The token that completes a match is the sample's last one.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False

    def after(self, num_prior_tokens: int, max_tokens: int) -> "Sampling":
        """Parameters for at most `max_tokens` more tokens, after the response's first ones."""
        min_tokens = max(self.min_tokens - num_prior_tokens, 0)
        return replace(self, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))

    @property
    def depends_on_response(self) -> bool:
        """True if the distribution of a token depends on the earlier tokens of the response.

        The model's own dependence does not count, nor does that on their number.
        """
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.bad_words
            or self.structured_outputs
        )


class TokenLogprob(NamedTuple):
    """Log-probability of a token and its rank, counted from 1."""

    token_id: int
    logprob: float
    rank: int


TopLogprobs = list[TokenLogprob]
"""The sampled token's logprob, then the top k, which may include the sampled token again."""


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobRows(Sequence[TopLogprobs]):
    """Top logprobs at several positions, as arrays: a Python object per token would be slow.

    `token_ids` and `logprobs` are [positions, 1 + k]. Column 0 is the token at the position itself,
    with its rank in `ranks`. A logprob of minus infinity marks an entry that does not exist.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, at: int) -> TopLogprobs: ...

    @overload
    def __getitem__(self, at: slice) -> "TopLogprobRows": ...

    def __getitem__(self, at: int | slice) -> "TopLogprobs | TopLogprobRows":
        if isinstance(at, slice):
            return TopLogprobRows(self.token_ids[at], self.logprobs[at], self.ranks[at])
        width = self.token_ids.shape[1]
        ranks = [int(self.ranks[at]), *range(1, width)]
        each = zip(self.token_ids[at].tolist(), self.logprobs[at].tolist(), ranks, strict=True)
        return [TokenLogprob(*entry) for entry in each if entry[1] > -np.inf]

    @classmethod
    def joined(cls, parts: Sequence["TopLogprobRows"]) -> "TopLogprobRows":
        """The rows of consecutive positions."""
        return cls(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )

    def columns(self, k: int) -> "TopLogprobRows":
        """The same positions with the k most probable tokens only."""
        return TopLogprobRows(self.token_ids[:, : k + 1], self.logprobs[:, : k + 1], self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens `start` to `end` (excluded) of a response, sampled under one weights version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvVersionSpan:
    """Positions `start` to `end` (excluded) of a prompt and response, and their KV's version.

    The tokens from `first_token` on were conditioned on it, up to the next larger `first_token`:
    from there, the KV of the earlier positions had been computed again. Spans with the same
    `first_token` cover all positions from 0.
    """

    version: str
    start: int
    end: int
    first_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKv:
    """KV that the requests of a chain keep across weights updates.

    `chain` is the private salt of the chain's blocks. KV is read for at most `max_lag` updates
    after that of the version that computed it; None: without a limit.
    """

    chain: str
    max_lag: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Tokens that a running sample has generated since its last delta.

    `start` is the index of the first one in the response, and `versions` has indices of the
    response, too. `num_cached_tokens` counts those of the prompt.
    """

    start: int
    token_ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    top_logprobs: TopLogprobRows | None = None
    text: str | None = None
    """Text that the tokens complete, if it was requested."""
    num_cached_tokens: int = 0


OnTokens = Callable[[TokenDelta], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sample to generate.

    `id` is assigned by the server and unique. One sample of a group may carry an export; it is
    written once, as soon as the prompt is prefilled.

    `entropy_top_k` returns per token the renormalised entropy of the top k tokens,
    `num_top_logprobs` the top k tokens themselves, and `logprob_token_ids` the logprobs of these
    tokens. With `raw_logprobs`, the last two are those of the model's own distribution, and the
    sampled token's logprob under it is returned, too. With `support`, the set of token ids that
    each token was sampled from is returned. Prefixes are shared among samples with the same
    `cache_salt`, and among samples without one. KV of samples with a `session_id` is evicted after
    other cached KV while the session is paused. Samples of the same `group` may be drafted from
    each other's text, unless `speculation` is false. Samples with the same chain in `kept_kv` share
    prefixes among themselves only; it replaces `cache_salt`, and excludes exports and loads.
    `adapter` is the label of a loaded adapter. Without `returns_logprobs`, the logprobs are NaN:
    they take a third of the time per token of the processes around the model. `multimodal_input` is
    that of `Text.encode_chat_with_images`; the prompt begins with its tokens. With `returns_text`,
    the tokens are returned with their text, as vLLM detokenizes them. `on_tokens` receives the
    tokens while the sample runs. The routed experts are returned from position `experts_from` on.

    The last `num_prior_tokens` tokens of the prompt are the first ones of the response. Penalties,
    bad words, structured outputs and stop strings take them into account; the limits in `sampling`
    do not count them. The last `num_drawn_tokens` of them were sampled from the random stream of
    `seed`, which continues after them.

    With several engines, the one with `data_parallel_rank` is used if it is set. Otherwise it is
    chosen, and set for those who observe finished samples.
    """

    id: str
    prompt_token_ids: Sequence[int]
    multimodal_input: Any = None
    sampling: Sampling
    seed: int | None = None
    priority: int = 0
    export: ExportSlot | None = None
    entropy_top_k: int = 0
    num_top_logprobs: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    raw_logprobs: bool = False
    support: bool = False
    experts_from: int | None = None
    cache_salt: str | None = None
    kept_kv: KeptKv | None = None
    session_id: str | None = None
    group: str | None = None
    speculation: bool = True
    load: KvLoad | None = None
    adapter: str | None = None
    num_prior_tokens: int = 0
    num_drawn_tokens: int = 0
    data_parallel_rank: int | None = None
    returns_text: bool = False
    returns_logprobs: bool = True
    on_tokens: OnTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A validated LoRA adapter. `rank` is the highest rank of its modules."""

    rank: int
    num_modules: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Values of the tokens of a sample, one per token; None if they were not requested.

    `support` has encoded sets of token ids (`coppice.wire.columns.support`).
    """

    token_ids: list[int]
    logprobs: list[float]
    entropy: list[float] | None = None
    top_logprobs: TopLogprobRows | None = None
    given_logprobs: TopLogprobRows | None = None
    """Logprobs of `logprob_token_ids`; minus infinity for excluded tokens."""
    raw_logprobs: list[float] | None = None
    support: list[bytes] | None = None

    def first(self, num_tokens: int) -> dict[str, Any]:
        """The values of the first tokens, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(TokenValues)}
        return {name: each if each is None else each[:num_tokens] for name, each in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(TokenValues):
    """A finished sample, with one logprob and one weights version per token.

    `num_cached_tokens` is the number of prompt tokens found in the prefix cache or loaded.
    `stop_reason` is the stop string or stop token that ended the sample. None if it ended by the
    model's end-of-sequence token, or for another reason.
    """

    finish: EngineFinishReason
    versions: tuple[VersionSpan, ...]
    num_cached_tokens: int
    stop_reason: int | str | None = None
    text: str | None = None
    kv_versions: tuple[KvVersionSpan, ...] = ()
    """Versions of the KV that the tokens were conditioned on; the last token has no KV."""
    routed_experts: NDArray[np.integer[Any]] | None = None
    """Experts [positions, layers, experts per token] from `experts_from` on, without the last
    token, which the model has not read."""


FinishedListener = Callable[[SampleRequest, Completion], None]
