"""Rebalancing: a replica with many running samples moves rollouts to one with free sequences.

Rollouts of a batch end at different times, so one replica may still run many samples while another
one has none left. Whole rollouts are moved: the samples of a group share the KV of their prompt.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from service.cluster.membership import ClusterMembership
from service.cluster.registry import ClusterView, Replica
from service.moves.sender import MoveSender
from service.rollouts.manager import RolloutManager
from service.rollouts.rollout import Rollout

MIN_LOAD = 0.25
"""Load below which no samples are moved: a step with fewer samples is hardly shorter."""
MIN_RATIO = 2.0
"""Ratio of the loads of two replicas above which samples are moved."""
NUM_VIEWS = 3
"""Successive views with an imbalance: an entry may be older than a heartbeat interval."""
BACKOFF_SECONDS = 60.0
"""Time without moves after a replica has accepted none, and without another move of a rollout that
was kept: each attempt suspends it, and may cost a prefill here."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Number of running samples that this replica can move to `peer`."""

    peer: Replica
    num_samples: int


class Rebalancer:
    """Moves rollouts of this replica after NUM_VIEWS successive cluster views with an imbalance.

    Each rollout is moved once at most, and none that a drain has moved here. `is_enabled` returns
    false while rollouts must not be suspended. `on_moved` is called with the number of rollouts
    that were moved.
    """

    def __init__(
        self,
        rollouts: RolloutManager,
        cluster: ClusterMembership,
        sender: MoveSender,
        *,
        seconds: float,
        is_enabled: Callable[[], bool],
        on_moved: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rollouts = rollouts
        self._cluster = cluster
        self._sender = sender
        self._seconds = seconds
        self._is_enabled = is_enabled
        self._on_moved = on_moved
        self._clock = clock
        self._view_changed = asyncio.Event()
        self._num_unbalanced = 0
        self._retry_at = -float("inf")
        self._kept_until: dict[str, float] = {}
        cluster.view_listeners.append(self._on_view)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager in which the load is compared after each heartbeat."""
        async with asyncio.TaskGroup() as tasks:
            comparing = tasks.create_task(self._run(), name="rebalancing")
            try:
                yield
            finally:
                comparing.cancel()

    def _on_view(self, view: ClusterView) -> None:
        self._view_changed.set()

    async def _run(self) -> None:
        while True:
            await self._view_changed.wait()
            self._view_changed.clear()
            try:
                await self._compare()
            except Exception:  # such as of an engine that has died; the probes report it
                log.exception("rebalancing failed")

    async def _compare(self) -> None:
        """Move rollouts if the load was unbalanced in the previous views, too.

        Views that arrive during the moves are not counted, as they may lack what was moved.
        """
        found = self._shift() if self._is_enabled() and self._clock() >= self._retry_at else None
        self._num_unbalanced = 0 if found is None else self._num_unbalanced + 1
        if found is not None and self._num_unbalanced >= NUM_VIEWS:
            self._num_unbalanced = 0
            await self._move(found)
            self._view_changed.clear()

    def _shift(self) -> Shift | None:
        own = self._cluster.view.replicas.get(self._cluster.own_id)
        return None if own is None else shift(own, self._sender.candidates())

    async def _move(self, found: Shift) -> None:
        selected = self._selected(found.num_samples)
        if not selected:
            return
        peer_id = found.peer.id
        await self._sender.send_to(peer_id, selected, self._seconds, self._is_enabled)
        kept = [each for each in selected if each.moved_to is None and not each.ended]
        retry_at = self._clock() + BACKOFF_SECONDS
        self._kept_until |= dict.fromkeys((rollout.id for rollout in kept), retry_at)
        num_moved = sum(rollout.moved_to is not None for rollout in selected)
        self._on_moved(num_moved)
        if kept and not num_moved:
            self._retry_at = retry_at

    def _selected(self, num_samples: int) -> list[Rollout]:
        """Rollouts of at most this many running samples in all.

        The newest first: they have the most tokens left, and the fewest to prefill again.
        """
        selected, now = [], self._clock()
        self._kept_until = {key: until for key, until in self._kept_until.items() if until > now}
        for rollout in self._rollouts.in_flight():
            can_move = rollout.request is not None and rollout.source is None
            can_move = can_move and rollout.id not in self._kept_until
            if can_move and 0 < rollout.num_running <= num_samples:
                selected.append(rollout)
                num_samples -= rollout.num_running
        return selected


def shift(own: Replica, peers: Sequence[Replica]) -> Shift | None:
    """Samples that `own` can move so that it has the same load as its peer; None for none.

    The busiest replica moves samples to the least busy one, the second busiest to the second least
    busy one, and so on, so that no replica receives samples of two. Replicas without a number of
    sequences have not started, or are of another release.
    """
    known = [each for each in peers if each.num_sequences and each.id != own.id]
    if not own.num_sequences or _load(own) < MIN_LOAD:
        return None
    ordered = sorted([own, *known], key=lambda each: (_load(each), each.id))
    peer = ordered[-1 - ordered.index(own)]
    if _load(own) < MIN_RATIO * _load(peer):
        return None
    num_sequences = own.num_sequences + peer.num_sequences
    excess = own.num_samples * peer.num_sequences - peer.num_samples * own.num_sequences
    num_samples = min(excess // num_sequences, peer.num_sequences - peer.num_samples)
    return Shift(peer=peer, num_samples=num_samples) if num_samples > 0 else None


def _load(replica: Replica) -> float:
    """Running samples per sequence; above 1 if some of them wait in the engine's queue."""
    return replica.num_samples / replica.num_sequences
