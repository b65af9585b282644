"""Internal form of a rollout request, the same for routes, agent sessions and hand-overs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from coppice.wire.branching import Branching
from coppice.wire.chat import Message
from coppice.wire.columns.kv_version_spans import ChainKeepKv
from coppice.wire.kv_reuse import KvReuse
from coppice.wire.prompt_kv import Kv
from coppice.wire.rollouts import (
    ContinueFrom,
    Finish,
    GroupRequest,
    LogprobsMode,
    Prompt,
    PromptSpan,
    RolloutRequest,
    WeightsConstraint,
)
from coppice.wire.sampling import Sampling
from engine.types.samples import KeptKv
from service.rollouts.groups.sample_observer import SampleObserver


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGroup:
    """One prompt, as token ids if it was tokenized before, and the number of its samples.

    `multimodal_input` is the engine's input of a prompt of token ids that has images.
    """

    prompt: Prompt | list[int]
    n: int = 1
    id: str | None = None
    seed: int | None = None
    seeds: Sequence[int] | None = None
    multimodal_input: Any = None

    @property
    def token_ids(self) -> list[int] | None:
        return self.prompt if isinstance(self.prompt, list) else self.prompt.token_ids

    @property
    def spans(self) -> Sequence[PromptSpan] | None:
        return None if isinstance(self.prompt, list) else self.prompt.spans

    @property
    def messages(self) -> Sequence[Message] | None:
        return None if isinstance(self.prompt, list) else self.prompt.messages

    @property
    def num_images(self) -> int:
        return 0 if isinstance(self.prompt, list) else self.prompt.num_images

    @property
    def has_text(self) -> bool:
        """True if the samples are returned with their text."""
        given = self.prompt
        return not isinstance(given, list) and (given.text is not None or self.messages is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRollout:
    """A rollout to start, of one API key.

    The fields up to `stream_tokens` are those of the body of POST /v1/rollouts, which is `body` if
    the rollout may be moved to another replica. Calls of sessions and of other servers' routes set
    the fields after it: `num_top_logprobs` are computed for their responses. With `returns_text`,
    the tokens of samples have their text; without `returns_logprobs`, their logprobs are NaN.
    `observer` follows the samples in place of a log of their tokens.
    """

    owner: str = ""
    groups: Sequence[NewGroup]
    sampling: Sampling = Sampling()
    kv: Kv | None = None
    weights: WeightsConstraint | None = None
    finish: Finish | None = None
    branching: Branching | None = None
    continue_from: ContinueFrom | None = None
    kv_reuse: KvReuse | None = None
    keep_kv: ChainKeepKv | None = None
    priority: int = 0
    speculation: bool = True
    return_support: bool = False
    adapter: str | None = None
    top_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    logprobs_mode: LogprobsMode = "processed_logprobs"
    prompt_logprobs: int | None = None
    echo: bool = False
    return_message: bool = False
    return_routed_experts: bool | None = None
    stream: bool = False
    stream_tokens: bool = False
    body: RolloutRequest | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    chain: KeptKv | None = None
    num_top_logprobs: int = 0
    returns_text: bool = False
    returns_logprobs: bool = True
    observer: SampleObserver | None = None

    @classmethod
    def of(cls, body: RolloutRequest, *, owner: str, can_move: bool) -> Self:
        fields = dict(body) | {"groups": [_new_group(group) for group in body.groups]}
        return cls(**fields, owner=owner, body=body if can_move else None)


class Resolved(NamedTuple):
    """Weights version that a rollout requires, if it requires one, and its adapter's version."""

    exact_version: str | None
    adapter: str | None


def _new_group(group: GroupRequest) -> NewGroup:
    return NewGroup(**dict(group))
