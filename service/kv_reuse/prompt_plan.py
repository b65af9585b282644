"""What prepares a group's prompt, as the group knows it."""

from typing import Protocol

from coppice.wire.reuse import ReuseReason
from engine.kv_types import ExportSlot, KvLoad
from engine.protocol import Completion, Engine, SampleRequest
from service.kv_reuse.lease import SegmentLease
from service.kv_reuse.monitor import GroupMonitor


class PromptPlan(Protocol):
    """What a group's samples load instead of computing it. Counts are of tokens.

    `lease` are its segments. `prefill_requests` enter the engine with the samples, of which the
    first carries `export`. `reason`: why there is nothing to load. `num_anchors` are those that the
    prompt was predicted from.
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
        """By links, in front of the samples."""

    @property
    def num_anchors(self) -> int: ...

    async def prepare(self, engine: Engine, monitor: GroupMonitor) -> KvLoad | None:
        """None: the prompt is computed. Broken: and nothing comes of it. Cancelling it leaves
        requests in the engine, which the watch knows."""

    async def on_completed(self, request: SampleRequest, done: Completion) -> None:
        """In their order."""

    def is_approximate(self, num_cached: int) -> bool:
        """Whether anything that is not exact stands in front of a sample that had so many tokens
        cached."""

    def is_loaded(self, num_cached: int) -> bool:
        """Whether anything was."""

    def forget(self) -> None:
        """The engine knows no more that it was written: it is to be written anew."""

    def release(self, *, settled: bool) -> None:
        """Gives back what is pinned, however far it came. `settled`: every request that was to load
        has ended by itself."""
