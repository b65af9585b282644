"""Loop that brings the weights of this replica in line with the cluster registry.

Each view of the registry says what is wanted: the published versions, and the one that all replicas
serve, the activation target. A step compares it with what is here, and publishes, deletes,
downloads and activates what differs. Every step is repeated with the next view, so failures are
retried, and the state of a registry that was reset is restored.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from coppice.wire.columns.kv_version_spans import ActivationKv
from engine.types.samples import WEIGHTS
from service.cluster.membership import ClusterMembership
from service.cluster.registry import (
    ActivationTarget,
    ClusterView,
    Manifest,
    RegistryUnavailable,
)
from service.cluster.replica_status import ReplicaStatus
from service.errors import ServiceError, VersionConflict
from service.weights.activation import Activation
from service.weights.replication.announcer import Announcer
from service.weights.replication.downloads import Downloads, fetch_failed
from service.weights.replication.manifests import (
    conflicts_with_manifest,
    is_published,
    was_withdrawn,
)
from service.weights.stager import WeightStager
from service.weights_versions import Version, Versions

POLL_SECONDS = 0.2
ERROR_PAUSE_SECONDS = 1.0

log = logging.getLogger(__name__)


class Reconciler:
    """Makes this replica publish, fetch, delete and activate versions as the registry demands.

    Writes `replica_status`. One step runs at a time. What must not wait for a step in progress,
    which may be an activation that waits for samples, is done with every view.
    """

    def __init__(
        self,
        cluster: ClusterMembership,
        versions: Versions,
        stager: WeightStager,
        downloads: Downloads,
        announcer: Announcer,
        activation: Activation,
        replica_status: ReplicaStatus,
    ) -> None:
        self._cluster = cluster
        self._versions = versions
        self._stager = stager
        self._downloads = downloads
        self._announcer = announcer
        self._activation = activation
        self.replica_status = replica_status
        self._requested_target: tuple[str, int] | None = None  # id, order of the request
        self._own_target_id: str | None = None
        self._loop: asyncio.Task[None] | None = None
        self._is_following = self._is_closed = False
        self._view_changed = asyncio.Event()
        cluster.on_view = self._on_view

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager; on exit the loop, which `catch_up` starts, and all downloads end."""
        try:
            yield
        finally:
            self._is_following, self._is_closed = False, True
            if self._loop is not None:
                self._loop.cancel()
                await asyncio.gather(self._loop, return_exceptions=True)
            await self._downloads.close()

    async def catch_up(self, seconds: float) -> None:
        """Start the loop, and wait until the cluster's target version is active here.

        Gives up after `seconds`. Call it once the engine, which checks fetched weights, has
        started. A standalone server has no target to follow.
        """
        if self._cluster.is_standalone or self._is_closed:
            return
        self._is_following = True
        self._loop = asyncio.create_task(self._follow())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._wait_for_target()
        log.error(
            "serving %s, not the activation target: timeout",
            self._versions.active.label,
        )

    async def _wait_for_target(self) -> None:
        while True:
            with suppress(RegistryUnavailable):
                if self._has_caught_up(await self._cluster.refresh()):
                    return
            await asyncio.sleep(POLL_SECONDS)

    async def _follow(self) -> None:
        """Run a step for each new view; an exception is logged and does not end the loop."""
        while True:
            await self._view_changed.wait()
            self._view_changed.clear()
            try:
                await self._step()
            except Exception:
                log.exception("a reconciliation with the cluster registry failed")
                await asyncio.sleep(ERROR_PAUSE_SECONDS)

    def _on_view(self, view: ClusterView) -> None:
        self._announcer.on_view(view)
        self._versions.learn_sequences({m.version: m.sequence for m in view.manifests.values()})
        self._start_downloads(view)
        self._request_target(view.target)
        self._view_changed.set()

    async def _step(self) -> None:
        with suppress(RegistryUnavailable):
            await self._publish(self._cluster.view)
        view = self._cluster.view  # publishing may have refreshed it
        await self._delete_withdrawn(view)
        self._start_downloads(view)  # a deleted label may be published with other files
        if view.target is not None and self._is_newer_target(view.target):
            await self._apply_target(view.target, view)

    async def _publish(self, view: ClusterView) -> None:
        """Send the withdrawals, manifests and activation target that the cluster registry lacks."""
        await self._announcer.sync(view)
        applied = self.replica_status.applied
        if applied is not None and (view.target is None or view.target.epoch < applied.epoch):
            await self._cluster.registry.set_target(applied)

    async def _delete_withdrawn(self, view: ClusterView) -> None:
        """Delete local versions that another replica withdrew or published with other files."""
        if not view.known or not self._cluster.is_settled or self._announcer.needs_reannounce:
            return
        withdrawn_labels = {v.label for v in self._versions.all() if was_withdrawn(v, view)}
        for label in withdrawn_labels - self._downloads.in_progress:
            if self._announcer.is_outdated(view, label):
                continue
            with suppress(ServiceError):
                await self._stager.delete(label, sync=False)
                self.replica_status.on_success(label)  # its failure concerned the deleted files

    async def ensure_present(self, label: str, seconds: float) -> None:
        """Download a published version that this replica lacks; VersionConflict on failure."""
        manifest = self._cluster.view.manifests.get(label)
        if manifest is None or not self._is_missing(manifest):
            return
        if not self._is_following:
            raise fetch_failed("this replica is shutting down")
        await self._downloads.wait_for(manifest, seconds)

    def _start_downloads(self, view: ClusterView) -> None:
        for manifest in self._versions_to_fetch(view) if self._is_following else ():
            self._downloads.start(manifest)

    def _versions_to_fetch(self, view: ClusterView) -> list[Manifest]:
        """Manifests to download now: the activation target first, then all newer versions.

        Versions older than the active one are skipped. A version whose base is still to be
        downloaded is deferred, so that it can be fetched as a delta.
        """
        due = [
            manifest
            for manifest in view.manifests.values()
            if self._is_missing(manifest)
            and self.replica_status.is_due(manifest.version)
            and not self._announcer.is_outdated(view, manifest.version)
        ]
        target = None if view.target is None else view.manifests.get(view.target.version)
        if target is not None and target in due:
            return [target]
        active = self._versions.active.sequence
        min_sequence = active if target is None else max(active, target.sequence)
        newer = sorted(
            (manifest for manifest in due if manifest.sequence > min_sequence),
            key=lambda manifest: manifest.sequence,
        )
        later = {manifest.version for manifest in newer} | self._downloads.in_progress
        return [manifest for manifest in newer if manifest.base not in later]

    def _is_missing(self, manifest: Manifest) -> bool:
        version = self._versions.find(manifest.version)
        return version is None or version.state == "incomplete"

    def _request_target(self, target: ActivationTarget | None) -> None:
        """Request the activation of a newer target: an earlier activation may wait for samples."""
        if target is None or not self._is_newer_target(target):
            return
        if self._order_of_request(target) is None:
            order = self._activation.idle_wait.request(target.version, target.mode)
            self._requested_target = target.id, order

    def _order_of_request(self, target: ActivationTarget) -> int | None:
        """Order of the activation of a target; None if this replica has seen a newer target."""
        if self._requested_target is None or self._requested_target[0] != target.id:
            return None
        return self._requested_target[1]

    async def _apply_target(self, target: ActivationTarget, view: ClusterView) -> None:
        label = target.version
        if WEIGHTS in self._activation.sleep.tags:
            return  # a trainer uses the memory: a later view is applied after the wake
        order = self._order_of_request(target)
        if order is None or self._activation.idle_wait.is_replaced(order):
            return  # a later activation becomes the next target, unless it fails
        if label in self._downloads.in_progress or not self.replica_status.is_due(label):
            return
        try:
            version = self._published_version(label, view)
            await self._activate(target, order, is_active=version == self._versions.active)
        except ServiceError as error:
            self.replica_status.on_failure(label, str(error))
            self._cluster.request_heartbeat()
        else:
            self.replica_status.on_success(label)
            self.on_target_applied(target)

    def _published_version(self, label: str, view: ClusterView) -> Version:
        version = self._versions.find(label)
        if version is None or version.state == "incomplete":
            raise VersionConflict("no replica has published its files")
        is_announced = version.announced and not conflicts_with_manifest(version, view)
        if is_published(version) and not is_announced:
            raise VersionConflict("other replicas have different weights")
        return version

    async def _activate(self, target: ActivationTarget, order: int, *, is_active: bool) -> None:
        """Activate a target; an earlier one that was skipped may have reset the prefix cache."""
        has_skipped = not self._follows_applied_target(target)
        if has_skipped and is_active:
            await self._activation.reset_prefix_cache()
        kv: ActivationKv = "reset" if has_skipped else target.kv
        await self._activation.apply(
            target.version, target.mode, allow_rollback=True, kv=kv, order=order
        )

    def on_target_applied(self, target: ActivationTarget) -> None:
        self.replica_status.on_target_applied(target)
        self._cluster.stop_fast_heartbeats()

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

    def kv_of_activation(self, kv: ActivationKv) -> ActivationKv:
        """Handling of KV here in an activation for all: `reset` if this replica lacks a target."""
        target = self._cluster.view.target
        return "reset" if target is not None and self._is_newer_target(target) else kv

    def _follows_applied_target(self, target: ActivationTarget) -> bool:
        """True if this replica has applied the target that this one replaced.

        While partitioned, a replica can apply a target of its own with the epoch of another one.
        """
        applied = self.replica_status.applied
        last = None if applied is None else applied.id
        return target.epoch == self.replica_status.epoch + 1 and target.previous == last

    def _is_newer_target(self, target: ActivationTarget) -> bool:
        """Return True if this replica has not applied the activation target yet.

        Two replicas can set targets with the same epoch while partitioned. The registry's target
        wins, and the replica that set the other one applies it.
        """
        applied = self.replica_status.applied
        if target.id == self._own_target_id:
            return False
        if applied is not None and target.epoch == applied.epoch:
            return target.id != applied.id
        return target.epoch > self.replica_status.epoch

    def _has_caught_up(self, view: ClusterView) -> bool:
        if view.target is None:
            # Before it is settled, other replicas may not have restored the target after a reset.
            return self._cluster.is_settled
        return not self._is_newer_target(view.target)
