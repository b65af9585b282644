"""Recomputation of kept KV that exceeds its limits, between the requests of its chains.

The context that a chain would prefill at its next request is prefilled before it, by requests of
that chain with its limits. So EngineCore keeps the KV that is within the limits, computes the rest
from the first older position on, and labels it like that of any other request.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import uuid4

from engine.errors import RequestRefused
from engine.kv_versions.contexts import ChainContext, ContextStore
from engine.types import Completion, KeptKv, SampleRequest, Sampling

MAX_CONTEXTS: Final = 1024
MAX_REQUESTS: Final = 16
"""Maximum number of requests that compute one context: each is hashed from its first token on."""

MaxLag = Callable[[KeptKv], int | None]
"""Greatest age of the KV that a chain may read now; None: no limit."""


class RefreshEngine(Protocol):
    """Engine that runs the requests of a recomputation. RequestRefused: it cannot run this one."""

    async def sample(self, request: SampleRequest) -> Completion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshLimits:
    """Bounds of a recomputation: tokens per engine step, per context, and of all contexts.

    Requests end behind whole blocks of `block_size` tokens, because only these are cached.
    """

    tokens_per_step: int
    max_context_tokens: int
    max_retained_tokens: int
    block_size: int


class EndedContexts(ContextStore):
    """Prompts and responses of ended requests that no later request has continued.

    Only those of chains that limit their KV are retained, once after each request.
    """

    def on_submitted(self, samples: Sequence[SampleRequest]) -> None:
        """Remove the contexts that these requests continue: they compute the KV themselves."""
        prompts = {
            (sample.kept_kv.chain, id(sample.prompt_token_ids)): sample.prompt_token_ids
            for sample in samples
            if sample.kept_kv is not None
        }
        for (chain, _), prompt in prompts.items():
            same = [(k, each) for k, each in self.items() if each.kept.chain == chain]
            encoded = _encoded(prompt) if same else b""
            for key, context in same:
                if encoded.startswith(_encoded(context.token_ids)):
                    self.remove(key)

    def on_finished(self, sample: SampleRequest, completion: Completion) -> None:
        kept = sample.kept_kv
        if kept is None or sample.adapter is not None:
            return
        if kept.max_lag is not None or kept.max_kl is not None:
            token_ids = array("i", sample.prompt_token_ids) + array("i", completion.token_ids)
            self.put(sample.id, self.context_of(sample, completion, kept, token_ids))

    def beyond(self, max_lag: MaxLag) -> list[tuple[str, ChainContext]]:
        """Contexts with KV beyond its limit: the oldest KV first, else the last request first."""
        found = [
            (key, context)
            for key, context in self.items()
            if (limit := max_lag(context.kept)) is not None and self.lag(context) > limit
        ]
        return sorted(found, key=lambda each: -self.lag(each[1]))


class KvRefresh:
    """Contexts whose KV may exceed its limits, and their recomputation, one context at a time.

    Owners take turns: the one with the fewest tokens since the last update comes first.
    `num_tokens` counts the tokens that have been computed again.
    """

    def __init__(self, engine: RefreshEngine, limits: RefreshLimits) -> None:
        self.contexts = EndedContexts(limits.max_retained_tokens, MAX_CONTEXTS)
        self.num_tokens = 0
        self._num_tokens_of = Counter[str]()
        self._engine = engine
        self._limits = limits

    def on_update(self, *, keeps_kv: bool) -> None:
        self.contexts.on_update()
        self._num_tokens_of.clear()
        if not keeps_kv:
            self.contexts.clear()

    async def run(self, max_lag: MaxLag, priority: int) -> bool:
        """Compute an owner's context with the oldest KV beyond its limit; false if there is none.

        It ends early if a later request continues the context, which then computes the rest. If a
        pause aborts it or the weights change, the context is chosen again.
        """
        if not (beyond := self.contexts.beyond(max_lag)):
            return False
        key, context = min(beyond, key=lambda each: self._num_tokens_of[each[1].kept.owner])
        num_updates = self.contexts.num_updates
        for end in self._ends(len(context.token_ids)):
            if not await self._compute(key, context, end, priority):
                break
            if self.contexts.get(key) is not context or self.contexts.num_updates != num_updates:
                break
        else:
            self.contexts.remove(key)
        return True

    async def _compute(self, key: str, context: ChainContext, end: int, priority: int) -> bool:
        """Compute the first `end` tokens, unless they are cached; false if refused or aborted."""
        try:
            answer = await self._engine.sample(self._request(context, end, priority))
        except RequestRefused:
            self.contexts.remove(key)
            return False
        if answer.finish == "abort":
            return False
        num_computed = end - answer.num_cached_tokens
        self.num_tokens += num_computed
        self._num_tokens_of[context.kept.owner] += num_computed
        return True

    def _ends(self, num_tokens: int) -> Iterator[int]:
        """Numbers of tokens of the requests for one context: one more than whole blocks, and all.

        The last token of a prompt is never found in the cache, so it is no part of the blocks.
        """
        limits = self._limits
        num_tokens = min(num_tokens, limits.max_context_tokens - 1)
        step = max(limits.tokens_per_step, -(-num_tokens // MAX_REQUESTS))
        step = -(-step // limits.block_size) * limits.block_size
        yield from range(step + 1, num_tokens, step)
        yield num_tokens

    def _request(self, context: ChainContext, end: int, priority: int) -> SampleRequest:
        return SampleRequest(
            id=uuid4().hex,
            prompt_token_ids=context.token_ids[:end],
            sampling=Sampling(max_tokens=1),
            priority=priority,
            kept_kv=context.kept,
            speculation=False,
            data_parallel_rank=context.data_parallel_rank,
            prefill_tokens_per_step=self._limits.tokens_per_step,
        )


def _encoded(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
