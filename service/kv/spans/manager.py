"""KV reuse between prompts given as spans: chooses splicing, prediction or neither."""

from collections.abc import Sequence
from pathlib import Path

from coppice.wire.kv_reuse import KvReuse
from coppice.wire.rollouts import PromptSpan
from engine.protocol.prompt_kv import PromptKv
from service.kv.prompt_source import PromptSource
from service.kv.spans.index import SpanIndex
from service.kv.spans.observations import Observations
from service.kv.spans.pinned_spans import PinnedSpans
from service.kv.spans.predicted_prompt import DEFAULT_MAX_ENTROPY, PredictedPrompt
from service.kv.spans.prediction_sources import DistanceCache
from service.kv.spans.prompt_template import Scope
from service.kv.spans.span_prompt import SpanPrompt
from service.kv.spans.spliced_prompt import DEFAULT_RECOMPUTE_TOKENS, SplicedPrompt
from service.weights_versions import Versions


class KvReuseManager:
    """Manages KV reuse between prompts, from cached spans and observed prompts.

    Open `spans` once the engine serves.
    """

    def __init__(
        self,
        engine: PromptKv,
        versions: Versions,
        *,
        directory: Path,
        capacity_bytes: int | None,
    ) -> None:
        self.spans = SpanIndex(
            engine,
            directory=directory,
            capacity_bytes=capacity_bytes,
            epoch=lambda: versions.epoch,
        )
        self.observations = Observations(self.spans)
        self._distances = DistanceCache(self.spans)

    async def close(self) -> None:
        self._distances.close()
        await self.observations.close()
        await self.spans.store.close()

    def prompt_source(
        self,
        spans: Sequence[PromptSpan],
        reuse: KvReuse | None,
        scope: Scope,
        *,
        priority: int,
        num_samples: int,
    ) -> PromptSource:
        """Source of the prompt KV of a group whose prompt is given as spans."""
        pinned = PinnedSpans(index=self.spans, scope=scope, priority=priority)
        if reuse is None or reuse.mode == "off":
            return SpanPrompt(pinned=pinned, spans=spans, num_samples=num_samples)
        if reuse.mode == "predict":
            return PredictedPrompt(
                pinned=pinned,
                spans=spans,
                num_samples=num_samples,
                observations=self.observations,
                distances=self._distances,
                max_entropy=DEFAULT_MAX_ENTROPY if reuse.max_entropy is None else reuse.max_entropy,
            )
        num_tokens = reuse.recompute_tokens
        return SplicedPrompt(
            pinned=pinned,
            spans=spans,
            num_samples=num_samples,
            recompute_tokens=DEFAULT_RECOMPUTE_TOKENS if num_tokens is None else num_tokens,
        )
