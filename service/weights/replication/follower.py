"""Loop that keeps the weights of this replica in line with the cluster registry.

Every step is repeated with the next heartbeat, so failures are retried, and the state of a registry
that was reset is restored.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from coppice.wire.columns.kv_versions import ActivationKv
from engine.types.samples import WEIGHTS
from service.cluster.membership import ClusterMembership
from service.cluster.registry import ActivationTarget, ClusterView, RegistryUnavailable
from service.cluster.replica_status import ReplicaStatus
from service.errors import ServiceError, VersionConflict
from service.versions import Version, Versions
from service.weights.activation import Activation
from service.weights.replication.announcer import (
    Announcer,
    conflicts_with_manifest,
    is_published,
    was_withdrawn,
)
from service.weights.replication.background_downloads import Fetcher
from service.weights.replication.downloader import WeightsDownloader
from service.weights.stager import WeightStager

POLL_SECONDS = 0.2
ERROR_PAUSE_SECONDS = 1.0

log = logging.getLogger(__name__)


class Follower:
    """Makes this replica fetch, delete and activate versions as the cluster registry demands.

    Also restores a registry that was reset, and writes `replica_status`. One step runs at a time.
    """

    def __init__(
        self,
        cluster: ClusterMembership,
        versions: Versions,
        stager: WeightStager,
        downloader: WeightsDownloader,
        announcer: Announcer,
        activation: Activation,
        replica_status: ReplicaStatus,
    ) -> None:
        self._cluster = cluster
        self._versions = versions
        self._stager = stager
        self.replica_status = replica_status
        self._announcer = announcer
        self._activation = activation
        self.fetcher = Fetcher(cluster, versions, downloader, replica_status, announcer)
        self._last_target: ActivationTarget | None = None
        self._requested_target: tuple[str, int] | None = None  # id, order of the request
        self._own_target_id: str | None = None
        self._step_lock = asyncio.Lock()
        self._engine_started = asyncio.Event()
        self._fetches = asyncio.Event()
        self._view_changed = asyncio.Event()
        cluster.view_listeners.append(self._on_view)

    async def run(self) -> None:
        """Run the reconciliation loop once the engine, which checks fetched weights, has started.

        A standalone server never starts the loop.
        """
        await self._engine_started.wait()
        async with self.fetcher.running():
            self._fetches.set()
            await self._follow()

    async def _follow(self) -> None:
        while True:
            await self._view_changed.wait()
            self._view_changed.clear()
            await self._step_safely(self._cluster.view)

    async def catch_up(self, seconds: float) -> None:
        """Try to activate the cluster's target version before the server accepts requests.

        Gives up after `seconds`. Call it after the engine has started. A standalone server has no
        target to follow.
        """
        if self._cluster.is_standalone:
            return
        self._engine_started.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._catch_up()
        log.error(
            "serving %s, not the activation target: timeout",
            self._versions.active.label,
        )

    async def _catch_up(self) -> None:
        await self._fetches.wait()  # before, the target would count as failed, and be tried later
        while True:
            with suppress(RegistryUnavailable):
                view = await self._cluster.refresh()
                await self._step_safely(view)
                if self._has_caught_up(view):
                    return
            await asyncio.sleep(POLL_SECONDS)

    async def _step_safely(self, view: ClusterView) -> None:
        """Run one reconciliation step; an exception is logged and does not end the loop."""
        try:
            await self._step(view)
        except Exception:
            log.exception("a reconciliation with the cluster registry failed")
            await asyncio.sleep(ERROR_PAUSE_SECONDS)

    async def _step(self, view: ClusterView) -> None:
        async with self._step_lock:
            with suppress(RegistryUnavailable):
                await self._sync(view)
            view = self._cluster.view  # _sync may have refreshed it
            await self._delete_withdrawn(view)
            self.fetcher.on_view(view)  # a deleted label may be published with other files
            if view.target is not None and self._is_newer_target(view.target):
                await self._apply_target(view.target, view)

    @contextmanager
    def setting_target(self, target_id: str) -> Iterator[None]:
        """Context manager in which the coordinator makes an active version the cluster's target.

        The view can contain the target before the coordinator calls `on_target_applied`. If
        another target was set meanwhile, it is applied even if its activation was replaced.
        """
        self._own_target_id = target_id
        try:
            yield
        except BaseException:
            self._requested_target = None
            raise
        finally:
            self._own_target_id = None

    def on_target_applied(self, target: ActivationTarget) -> None:
        self._last_target = target
        self.replica_status.on_target_applied(target.epoch)
        self._cluster.stop_fast_heartbeats()

    async def _sync(self, view: ClusterView) -> None:
        """Send the withdrawals, manifests and activation target that the cluster registry lacks."""
        await self._announcer.sync(view, self._announce_one)
        own_target = self._last_target
        if own_target is not None and (view.target is None or view.target.epoch < own_target.epoch):
            await self._cluster.registry.set_target(own_target)

    async def _announce_one(self, version: Version) -> bool:
        """Try to announce a version; returns False if another attempt is needed."""
        if not self.replica_status.is_due(version.label):
            return False
        try:
            announced = await self._announcer.announce(version)
        except VersionConflict as conflict:
            self._on_failure(version.label, str(conflict))
            return True
        if self._versions.find(version.label) is not None:
            self._versions.announced(version.label, announced)
        return announced

    async def _delete_withdrawn(self, view: ClusterView) -> None:
        """Delete local versions that another replica withdrew or published with other files."""
        if not view.known or not self._cluster.is_settled or self._announcer.needs_reannounce:
            return
        withdrawn_labels = {v.label for v in self._versions.all() if was_withdrawn(v, view)}
        for label in withdrawn_labels - set(self.fetcher.in_progress):
            if self._announcer.predates_announcement(view, label):
                continue
            with suppress(ServiceError):
                await self._stager.delete(label, sync=False)
                self.replica_status.on_success(label)  # its failure concerned the deleted files

    async def _apply_target(self, target: ActivationTarget, view: ClusterView) -> None:
        if WEIGHTS in self._activation.sleep.tags:
            return  # a trainer uses the memory: a later view is applied after the wake
        order = self._order_of_request(target)
        if order is None or self._activation.is_replaced(order):
            return  # a later activation becomes the next target, unless it fails
        version = self._versions.find(target.version)
        if target.version in self.fetcher.in_progress or not self.replica_status.is_due(
            target.version
        ):
            return
        if version is None or version.state == "incomplete":
            self._on_failure(target.version, "no replica has published its files")
            return
        if is_published(version) and (
            not version.announced or conflicts_with_manifest(version, view)
        ):
            self._on_failure(target.version, "other replicas have different weights")
            return
        try:
            await self._activate(target, order, is_active=version == self._versions.active)
        except ServiceError as error:
            self._on_failure(target.version, str(error))
        else:
            self.replica_status.on_success(target.version)
            self.on_target_applied(target)

    async def _activate(self, target: ActivationTarget, order: int, *, is_active: bool) -> None:
        """Activate a target; an earlier one that was skipped may have reset the prefix cache."""
        has_skipped = not self._follows_last_target(target)
        if has_skipped and is_active:
            await self._activation.reset_prefix_cache()
        kv: ActivationKv = "reset" if has_skipped else target.kv
        await self._activation.apply(
            target.version, target.mode, allow_rollback=True, kv=kv, order=order
        )

    def _follows_last_target(self, target: ActivationTarget) -> bool:
        """True if this replica has applied the target that this one replaced.

        While partitioned, a replica can apply a target of its own with the epoch of another one.
        """
        last = None if self._last_target is None else self._last_target.id
        return target.epoch == self.replica_status.epoch + 1 and target.previous == last

    def kv_of_activation(self, kv: ActivationKv) -> ActivationKv:
        """Handling of KV here in an activation for all: `reset` if this replica lacks a target."""
        target = self._cluster.view.target
        return "reset" if target is not None and self._is_newer_target(target) else kv

    def _is_newer_target(self, target: ActivationTarget) -> bool:
        """Return True if this replica has not applied the activation target yet.

        Two replicas can set targets with the same epoch while partitioned. The registry's target
        wins, and the replica that set the other one applies it.
        """
        if target.id == self._own_target_id:
            return False
        if target.epoch == self.replica_status.epoch and self._last_target is not None:
            return target.id != self._last_target.id
        return target.epoch > self.replica_status.epoch

    def _has_caught_up(self, view: ClusterView) -> bool:
        if view.target is None:
            # Before it is settled, other replicas may not have restored the target after a reset.
            return self._cluster.is_settled
        return not self._is_newer_target(view.target)

    def _on_failure(self, label: str, reason: str) -> None:
        self.replica_status.on_failure(label, reason)
        self._cluster.request_heartbeat()

    def _on_view(self, view: ClusterView) -> None:
        self._view_changed.set()
        target = view.target
        if target is None or not self._is_newer_target(target):
            return
        if self._order_of_request(target) is None:  # an earlier activation may wait for samples
            order = self._activation.request(target.version, target.mode)
            self._requested_target = target.id, order

    def _order_of_request(self, target: ActivationTarget) -> int | None:
        """Order of the activation of a target; None if this replica has seen a newer target."""
        if self._requested_target is None or self._requested_target[0] != target.id:
            return None
        return self._requested_target[1]
