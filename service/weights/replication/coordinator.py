"""Activation of a weights version on all replicas, coordinated by the one that got the request.

First the other replicas fetch and stage the version, then it is activated here, then it becomes the
activation target in the cluster registry. So weights that cannot be loaded fail on one replica
only, and the others switch to a version that they have already staged. All waits together are
bounded by one timeout. Replicas that have failed, are draining or have left are not waited for.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from coppice.wire.columns.kv_version_spans import ActivationKv
from coppice.wire.weights import ActivationAnswer, ActivationMode
from service.cluster.membership import ClusterMembership
from service.cluster.registry import (
    ActivationTarget,
    ClusterView,
    RegistryUnavailable,
    Replica,
    new_target_id,
)
from service.config.settings import WeightsSettings
from service.errors import VersionConflict
from service.uncancellable_tasks import StateChanges
from service.weights.activation import Activation
from service.weights.replication.reconciler import Reconciler
from service.weights_versions import Versions

POLL_SECONDS = 0.1

log = logging.getLogger(__name__)


class ActivationCoordinator:
    """Runs an activation on all replicas when this replica receives the activation request."""

    def __init__(
        self,
        cluster: ClusterMembership,
        versions: Versions,
        activation: Activation,
        reconciler: Reconciler,
        state_changes: StateChanges,
        settings: WeightsSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._versions = versions
        self._reconciler = reconciler
        self._activation = activation
        self._state_changes = state_changes
        self._seconds = settings.replication_seconds
        self._clock = clock
        self._stopped = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager of the reconciliation with the cluster registry.

        On exit, activations wait neither for other replicas nor for downloads.
        """
        async with self._reconciler.running():
            try:
                yield
            finally:
                self._stopped = True

    async def activate(
        self,
        label: str,
        mode: ActivationMode,
        *,
        allow_rollback: bool,
        kv: ActivationKv = "reset",
    ) -> ActivationAnswer:
        """Activate a version on all replicas; the answer lists replicas that do not serve it yet.

        Once started, it does not stop half-way.
        """
        self._versions.check_has_files(label)
        if self._cluster.is_standalone:
            return await self._activation.apply(label, mode, allow_rollback=allow_rollback, kv=kv)
        return await self._state_changes.run(self._activate_on_all(label, mode, allow_rollback, kv))

    async def _activate_on_all(
        self, label: str, mode: ActivationMode, allow_rollback: bool, kv: ActivationKv
    ) -> ActivationAnswer:
        deadline = self._clock() + self._seconds
        await self._wait_until(lambda replica: True, deadline)
        await self._reconciler.ensure_present(label, max(0.0, deadline - self._clock()))
        self._versions.check_activation(label, allow_rollback=allow_rollback)
        await self._wait_until(
            lambda replica: label in replica.staged, deadline, failed_version=label
        )
        own_kv = self._reconciler.kv_of_activation(kv)
        answer = await self._activation.apply(label, mode, allow_rollback=allow_rollback, kv=own_kv)
        target = await self._set_target(label, mode, allow_rollback, kv)
        self._reconciler.on_target_applied(target)
        pending = await self._wait_until(
            lambda replica: replica.epoch >= target.epoch, deadline, failed_version=label
        )
        return answer.model_copy(
            update={"pending_replicas": sorted(replica.id for replica in pending)}
        )

    async def _set_target(
        self, label: str, mode: ActivationMode, allow_rollback: bool, kv: ActivationKv
    ) -> ActivationTarget:
        """Make a version the cluster's activation target, unless it is already; returns the target.

        If the registry is unavailable, the reconciler sets the target once the registry is back.
        """
        before = self._cluster.view.target
        if before is not None and before.version == label:
            return before
        known_epoch = 0 if before is None else before.epoch
        target = ActivationTarget(
            epoch=max(self._reconciler.replica_status.epoch, known_epoch) + 1,
            version=label,
            id=new_target_id(),
            previous=None if before is None else before.id,
            mode=mode,
            allow_rollback=allow_rollback,
            kv=kv,
        )
        try:
            with self._reconciler.setting_target(target.id):
                current_target = await self._cluster.registry.set_target(target)
                if current_target != target:
                    raise VersionConflict(
                        f"another replica activated {current_target.version!r} meanwhile"
                    )
        except RegistryUnavailable:
            log.warning(
                "%s is active on this replica only: the cluster registry does not respond", label
            )
        return target

    async def _wait_until(
        self, done: Callable[[Replica], bool], deadline: float, *, failed_version: str | None = None
    ) -> list[Replica]:
        """Wait until `done` holds for the other replicas or they have failed, or until `deadline`.

        Returns the replicas for which `done` does not hold.
        """
        while True:
            try:
                # A stopping server has left the registry; a refresh would register it again.
                view = self._cluster.view if self._stopped else await self._cluster.refresh()
            except RegistryUnavailable:
                return []
            pending = [replica for replica in self._others(view) if not done(replica)]
            time_is_up = self._stopped or self._clock() >= deadline
            if time_is_up or all(replica.failed == failed_version for replica in pending):
                return pending
            await asyncio.sleep(POLL_SECONDS)

    def _others(self, view: ClusterView) -> list[Replica]:
        return [
            replica
            for replica in view.replicas.values()
            if replica.id != self._cluster.own_id and replica.state == "serving"
        ]
