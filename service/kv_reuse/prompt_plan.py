"""Protocol of the plans that prepare a group's prompt."""

from typing import Protocol

from coppice.wire.reuse import ReuseReason
from engine.kv_types import ExportSlot, KvLoad
from engine.protocol import Engine
from engine.types import Completion, SampleRequest
from service.kv_reuse.monitor import GroupMonitor
from service.kv_reuse.span_lease import SegmentLease


class PromptPlan(Protocol):
    """Prompt KV that a group's samples load instead of prefilling it; counts are tokens.

    `lease` pins the spans. `prefill_requests` are submitted with the samples, the first of which
    carries `export`. `reason` says why there is nothing to load. `num_anchors` is the number of
    anchors from which the prompt was predicted.
    """

    @property
    def lease(self) -> SegmentLease: ...

    @property
    def prefill_requests(self) -> list[SampleRequest]: ...

    @property
    def export(self) -> ExportSlot | None: ...

    @property
    def reason(self) -> ReuseReason | None: ...

    @property
    def num_computed(self) -> int:
        """Tokens prefilled by the prefill requests before the samples."""

    @property
    def num_anchors(self) -> int: ...

    async def prepare(self, engine: Engine, monitor: GroupMonitor) -> KvLoad | None:
        """KV for the samples to load; None if the prompt is prefilled.

        Raises ReuseFailed if the KV cannot be prepared. If cancelled, its requests remain in the
        engine; the monitor knows them.
        """

    async def on_completed(self, request: SampleRequest, done: Completion) -> None:
        """Record the end of a prefill request; called in the order of `prefill_requests`."""

    def is_approximate(self, num_cached: int) -> bool:
        """True if a sample with `num_cached` cached tokens has used approximate KV."""

    def is_loaded(self, num_cached: int) -> bool:
        """True if a sample with `num_cached` cached tokens has loaded KV of this plan."""

    def forget(self) -> None:
        """Drop the plan's KV from the caches, so that it is written again.

        Called when the engine no longer knows that it was written.
        """

    def release(self, *, settled: bool) -> None:
        """Release the pins on cached spans, even if the preparation did not complete.

        `settled`: every request that was to load has ended by itself.
        """
