"""Base class of prompts given as spans; the subclasses reuse KV by splicing or prediction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coppice.wire.kv_reuse import KvReuseAnswer, KvReuseMode, KvReuseReason
from coppice.wire.rollouts import GroupAnswer, PromptSpan
from engine.protocol.generation import Generation
from engine.types.kv import KvLoad
from service.kv.prompt_source import GroupMonitor, PromptSource
from service.kv.spans.pinned_spans import PinnedSpans, ReuseFailed


@dataclass(kw_only=True, eq=False)
class SpanPrompt(PromptSource):
    """Prompt given as spans, for `num_samples` samples; reports how much KV it reused.

    The samples load the KV that `_load` prepares, or prefill if that fails. `num_computed` counts
    the tokens that requests before the samples have prefilled. `reason` is why the samples prefill.
    """

    mode: ClassVar[KvReuseMode] = "off"
    pinned: PinnedSpans
    spans: Sequence[PromptSpan]
    num_samples: int
    num_computed: int = 0
    num_observations: int = 0
    reason: KvReuseReason | None = None
    _is_loading: bool = False

    async def prepare(self, engine: Generation, monitor: GroupMonitor) -> KvLoad | None:
        if self.mode == "off":
            return None
        try:
            if self.pinned.index.reason is not None:
                raise ReuseFailed(self.pinned.index.reason)
            load = await self._load(engine, monitor)
        except ReuseFailed as failure:
            await monitor.abort_requests(engine)
            self.reason = failure.reason
            self.release(settled=False)
            return None
        self._is_loading = load is not None
        return load

    def annotated(self, answer: GroupAnswer) -> GroupAnswer:
        is_exact, num_observations = True, 0
        if self._is_loading:
            is_exact = not self.is_approximate(answer.num_cached_tokens)
            num_observations = self._observations_of(answer)
        computed = answer.num_prompt_tokens - answer.num_cached_tokens + self.num_computed
        report = KvReuseAnswer(
            mode=self.mode,
            num_reused_tokens=max(0, answer.num_prompt_tokens - computed),
            num_computed_tokens=computed,
            num_prepared_tokens=self.pinned.num_prepared,
            num_round_trips=1 + self.pinned.round_trips,
            num_observations=num_observations,
            reason=self.reason,
        )
        return answer.model_copy(update={"exact": is_exact, "kv_reuse": report})

    def release(self, *, settled: bool) -> None:
        self.pinned.release(settled=settled)

    def is_approximate(self, num_cached: int) -> bool:
        """True if a sample with `num_cached` cached tokens has used approximate KV."""
        return False

    def is_loaded(self, num_cached: int) -> bool:
        """True if a sample with `num_cached` cached tokens has loaded any KV that was prepared."""
        return self.is_approximate(num_cached)

    def forget(self) -> None:
        """Evict KV that the engine can no longer load, so that it is written again."""
        self.pinned.forget()

    async def _load(self, engine: Generation, monitor: GroupMonitor) -> KvLoad | None:
        """Prepare the KV that the samples load; raises ReuseFailed if they must prefill."""
        return None

    def _observations_of(self, answer: GroupAnswer) -> int:
        """Number of observations from which the prompt was predicted; 0 if it was prefilled."""
        if self.is_loaded(answer.num_cached_tokens):
            return self.num_observations
        self.reason = "not_loaded"
        if answer.samples[0].finish_reason in ("stop", "length"):
            self.forget()
        return 0
