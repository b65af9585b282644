"""Contexts of chains that limit the age or divergence of their KV, and those to measure."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from engine.types import Completion, KeptKv, SampleRequest

PROBE_TOKENS: Final = 16
"""Maximum number of tokens that a probe samples."""
CHAINS_PER_LAG: Final = 4
MAX_CONTEXTS: Final = 256
RETAINED_BUDGETS: Final = 8
"""Number of retained tokens of contexts, in multiples of the budget of one measurement."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainContext:
    """Tokens of a request of a chain, and the age of its KV at the update `num_updates`.

    Its KV is that of the engine with `data_parallel_rank`, if there are several.
    """

    kept: KeptKv
    token_ids: Sequence[int]
    session_id: str | None
    data_parallel_rank: int | None
    num_updates: int
    lag: int

    @property
    def num_probe_tokens(self) -> int:
        return len(self.token_ids) + PROBE_TOKENS


class ContextStore:
    """Contexts by key, of at most `max_tokens` tokens in total.

    Above the limits, the owner with most contexts or tokens loses its oldest context.
    """

    def __init__(self, max_tokens: int, max_contexts: int) -> None:
        self._max_tokens = max_tokens
        self._max_contexts = max_contexts
        self._contexts: OrderedDict[str, ChainContext] = OrderedDict()
        self._num_contexts = Counter[str]()
        self._num_tokens = Counter[str]()
        self.num_updates = 0

    def __len__(self) -> int:
        return len(self._contexts)

    def items(self) -> list[tuple[str, ChainContext]]:
        """Keys and contexts, the last one first."""
        return list(reversed(self._contexts.items()))

    def get(self, key: str) -> ChainContext | None:
        return self._contexts.get(key)

    def put(self, key: str, context: ChainContext) -> None:
        """Add a context as the last one. One with the same key is replaced."""
        self.remove(key)
        self._contexts[key] = context
        self._num_contexts[context.kept.owner] += 1
        self._num_tokens[context.kept.owner] += len(context.token_ids)
        self._limit()

    def remove(self, key: str) -> None:
        if (context := self._contexts.pop(key, None)) is None:
            return
        owner = context.kept.owner
        self._num_contexts[owner] -= 1
        self._num_tokens[owner] -= len(context.token_ids)
        if not self._num_contexts[owner]:
            del self._num_contexts[owner], self._num_tokens[owner]

    def clear(self) -> None:
        self._contexts.clear()
        self._num_contexts.clear()
        self._num_tokens.clear()

    def release(self, session_ids: Collection[str]) -> None:
        """Remove the contexts of sessions that have ended."""
        ended = set(session_ids)
        for key, context in self.items():
            if context.session_id in ended:
                self.remove(key)

    def on_update(self) -> None:
        self.num_updates += 1

    def lag(self, context: ChainContext) -> int:
        """Age that the KV of a context has now, if its blocks are still cached."""
        return self.num_updates - context.num_updates + context.lag

    def context_of(
        self, sample: SampleRequest, completion: Completion, kept: KeptKv, token_ids: Sequence[int]
    ) -> ChainContext:
        """Context with these tokens of a sample that ends now."""
        return ChainContext(
            kept=kept,
            token_ids=token_ids,
            session_id=sample.session_id,
            data_parallel_rank=sample.data_parallel_rank,
            num_updates=self.num_updates,
            lag=completion.kv_lag,
        )

    def _limit(self) -> None:
        while len(self._contexts) > self._max_contexts:
            self._remove_oldest_of(self._num_contexts)
        while self._num_tokens.total() > self._max_tokens:
            self._remove_oldest_of(self._num_tokens)

    def _remove_oldest_of(self, usage: Counter[str]) -> None:
        [(owner, _)] = usage.most_common(1)
        self.remove(next(k for k, each in self._contexts.items() if each.kept.owner == owner))


class ChainContexts(ContextStore):
    """Last prompts of the chains that ended a request last, of at most `max_tokens` tokens each."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(RETAINED_BUDGETS * max_tokens, MAX_CONTEXTS)
        self.max_tokens = max_tokens

    def on_finished(self, sample: SampleRequest, completion: Completion) -> None:
        """Retain the context of a sample whose chain limits the divergence of its KV."""
        kept = sample.kept_kv
        if kept is None or kept.max_kl is None or sample.adapter is not None:
            return
        context = self.context_of(sample, completion, kept, sample.prompt_token_ids)
        self.remove(kept.chain)
        if context.num_probe_tokens <= self.max_tokens:
            self.put(kept.chain, context)

    def discard(self, context: ChainContext) -> None:
        """Remove a context whose older KV is gone, unless a later one has replaced it."""
        if self.get(context.kept.chain) is context:
            self.remove(context.kept.chain)

    def with_older_kv(self) -> Iterator[tuple[int, ChainContext]]:
        """Contexts whose chains may read KV of older weights, with its age; the last one first."""
        for _, context in self.items():
            lag, max_lag = self.lag(context), context.kept.max_lag
            if lag and (max_lag is None or lag <= max_lag):
                yield lag, context


class ProbeChoice:
    """Choice of contexts to measure after one update, within a budget of prefilled tokens.

    One chain of each owner and age comes first, then a second one, and so on; among these, one of
    the owner with the fewest tokens so far. A chain without older KV is replaced by another one.
    """

    def __init__(self, contexts: ChainContexts) -> None:
        self.contexts = contexts
        self._left = contexts.max_tokens
        self._chosen = set[str]()
        self._num_chains = Counter[tuple[str, int]]()
        self._num_tokens = Counter[str]()

    def take(self) -> tuple[int, ChainContext] | None:
        """The next context with the age of its KV, or None."""
        found = min(self._candidates(), key=self._place, default=None)
        if found is not None:
            lag, context = found
            self._chosen.add(context.kept.chain)
            self._num_chains[context.kept.owner, lag] += 1
            self._spend(context, context.num_probe_tokens)
        return found

    def on_failed(self, lag: int, context: ChainContext, num_computed_tokens: int) -> None:
        """Let another chain be chosen instead of one without a result."""
        self._num_chains[context.kept.owner, lag] -= 1
        self._spend(context, min(num_computed_tokens - context.num_probe_tokens, 0))

    def _candidates(self) -> Iterator[tuple[int, ChainContext]]:
        for lag, context in self.contexts.with_older_kv():
            if (
                context.kept.chain not in self._chosen
                and context.num_probe_tokens <= self._left
                and self._num_chains[context.kept.owner, lag] < CHAINS_PER_LAG
            ):
                yield lag, context

    def _place(self, found: tuple[int, ChainContext]) -> tuple[int, int, int]:
        lag, context = found
        owner = context.kept.owner
        return self._num_chains[owner, lag], self._num_tokens[owner], lag

    def _spend(self, context: ChainContext, num_tokens: int) -> None:
        self._left -= num_tokens
        self._num_tokens[context.kept.owner] += num_tokens
