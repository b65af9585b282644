"""Composition of one server: creates its components, starts and closes them in order."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from coppice.wire.rollouts import GroupAnswer
from engine.errors import EngineError
from engine.protocol import Engine
from engine.types import EngineHealth
from service.adapters.adapter_files import AdapterFiles
from service.adapters.manager import AdapterManager
from service.checkpoint_store import CheckpointStore
from service.cluster.in_memory import InMemoryRegistry
from service.cluster.key_transfers import KeyTransfers
from service.cluster.membership import ClusterMembership
from service.cluster.redis_registry import RedisRegistry
from service.cluster.registry import ClusterRegistry, new_replica_id
from service.config.allowed_peers import Peers
from service.config.cluster import ClusterSettings
from service.config.settings import Settings
from service.drain import Drain
from service.fair_threads import FairThreads
from service.http.bodies import Bodies
from service.kv_reuse.manager import KvReuseManager
from service.moves.receiver import MoveReceiver
from service.moves.sender import MoveSender
from service.moves.session_receiver import SessionReceiver
from service.moves.session_sender import SessionSender
from service.observability.metrics import Metrics, watch_loop_lag
from service.observability.tracing import Tracing
from service.prompt_kv.http_transfer import KvDownloads
from service.prompt_kv.manager import PromptKvManager
from service.readiness import Readiness
from service.rollouts.admission import Admission
from service.rollouts.fairness import PriorityAging
from service.rollouts.group import Group
from service.rollouts.group_factory import GroupFactory
from service.rollouts.manager import RolloutManager
from service.rollouts.rollout import Rollout
from service.rollouts.scoring import Scoring
from service.rollouts.tokenizer import Tokenizer
from service.rollouts.trees.external_tree import ExternalTrees
from service.sessions.manager import SessionManager
from service.versions import Versions, first_version
from service.weights.activation import Activation
from service.weights.drafter import DrafterManager
from service.weights.replication.announcer import Announcer
from service.weights.replication.coordinator import ActivationCoordinator
from service.weights.replication.downloader import WeightsDownloader
from service.weights.replication.follower import Follower
from service.weights.replication.status import ReplicaStatus, ReplicationStatus
from service.weights.stager import WeightStager
from service.weights.transfers import WeightTransfers

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Server:
    """One replica of the service: creates its components around the engine, starts and closes them.

    Created before the event loop starts; active inside `running`. A `registry` passed in is shared
    with other servers of this process.
    """

    def __init__(
        self, settings: Settings, engine: Engine, registry: ClusterRegistry | None = None
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = Metrics()
        self.traces = Tracing(settings.trace)
        self.versions = Versions(
            first_version(
                settings.weights.initial_version, is_random=settings.engine.has_random_weights
            )
        )
        self.readiness = Readiness(engine)
        replica_status = ReplicaStatus(
            new_replica_id(), settings.server.advertised_url, self.readiness, self.versions
        )
        self.cluster = ClusterMembership(
            registry or _create_registry(settings.cluster),
            settings.cluster,
            describe=replica_status.entry,
            is_standalone=registry is None and settings.cluster.redis_url is None,
            on_failure=lambda operation: self.metrics.cluster.failures.labels(operation).inc(),
            on_unshared_key=self.metrics.cluster.unregistered_keys.inc,
        )
        self.checkpoints = CheckpointStore(
            settings.weights.directory, settings.weights.source_directories
        )
        limit = settings.limits.max_body_bytes
        self.threads = FairThreads("requests", key_bytes=2 * limit, total_bytes=4 * limit)
        self.bodies = Bodies(settings.limits, self.threads)
        self.tokenizer = Tokenizer(engine)
        self.prompt_kv = PromptKvManager(
            settings.kv,
            engine,
            replica_id=self.cluster.own_id,
            active_version=lambda: self.versions.active.label,
        )
        self.kv_reuse = KvReuseManager(
            engine,
            directory=settings.kv.directory,
            capacity_bytes=settings.kv.spans_bytes,
            epoch=lambda: self.versions.epoch,
        )
        self.kv_downloads = KvDownloads(
            settings.kv.max_open_transfers, on_sent=self.metrics.prompt_kv.sent_bytes.inc
        )
        self.adapters = AdapterManager(
            engine,
            AdapterFiles(self.checkpoints, max_bytes=settings.weights.max_upload_bytes),
            on_load=lambda outcome: self.metrics.weights.adapter_loads.labels(outcome).inc(),
        )
        self.admission = Admission(settings.limits)
        priority_aging = PriorityAging()
        group_factory = GroupFactory(
            engine,
            self.tokenizer,
            priority_aging,
            self.kv_reuse,
            max_lease_seconds=settings.limits.max_lease_seconds,
        )
        self.rollouts = RolloutManager(
            engine,
            self.versions,
            self.tokenizer,
            self.prompt_kv,
            self.cluster,
            self.adapters,
            admission=self.admission,
            max_support_bytes=settings.limits.max_support_bytes,
            keep_seconds=settings.limits.keep_answers_seconds,
            keep_bytes=settings.limits.keep_answers_bytes,
            group_factory=group_factory,
            ended=self._count_failed,
            record_group=self._count_group,
        )
        transfers = self.key_transfers = KeyTransfers(self.cluster)
        peers = Peers(settings.weights.peers, settings.weights.peer_key_file)
        self.move_receiver = MoveReceiver(
            engine,
            self.versions,
            self.admission,
            group_factory,
            self.rollouts,
            transfers,
            is_paused=lambda: self.activation.pauses.paused,
        )
        self.move_sender = MoveSender(
            engine,
            self.versions,
            self.admission,
            self.rollouts,
            self.cluster,
            transfers,
            peers,
            max_bytes=settings.limits.max_body_bytes,
            on_ended=lambda outcome: self.metrics.cluster.moves.labels(outcome).inc(),
        )
        self.external_trees = ExternalTrees(self.rollouts)
        self.sessions = SessionManager(
            settings.sessions,
            self.rollouts,
            self.tokenizer,
            self.threads,
            self.cluster,
            self.metrics.sessions,
            admission=self.admission,
            advertised_url=settings.server.advertised_url,
            keep_seconds=settings.limits.keep_answers_seconds,
            release_kv=engine.release_session_kv,
        )
        self.session_receiver = SessionReceiver(
            engine, self.sessions, self.rollouts, self.cluster, transfers
        )
        self._session_sender = SessionSender(
            self.sessions,
            self.cluster,
            transfers,
            peers,
            max_bytes=settings.limits.max_body_bytes,
            on_ended=lambda outcome: self.metrics.sessions.moves.labels(outcome).inc(),
        )
        self.scoring = Scoring(
            engine,
            self.versions,
            self.tokenizer,
            self.rollouts,
            self.adapters,
            admission=self.admission,
        )
        announcer = Announcer(self.cluster, self.versions)
        self.stager = WeightStager(
            engine,
            self.versions,
            self.checkpoints,
            announcer,
            retain_superseded=settings.weights.retain_superseded,
            on_received=self.metrics.weights.record_upload,
        )
        self.drafters = DrafterManager(engine, self.checkpoints)
        self.activation = Activation(
            engine,
            self.versions,
            self.stager,
            self.rollouts,
            self.prompt_kv,
            announcer,
            max_lease_seconds=settings.limits.max_lease_seconds,
            run_to_completion=self.run_to_completion,
            on_activated=self.metrics.weights.record_activation,
            on_weights_changed=self._on_weights_changed,
            on_lease_ended=self.metrics.server.pause_leases_ended.inc,
        )
        downloader = WeightsDownloader(
            self.stager,
            self.checkpoints,
            settings.weights,
            on_fetched=lambda source: self.metrics.weights.fetches.labels(source).inc(),
        )
        self._follower = Follower(
            self.cluster,
            self.versions,
            self.stager,
            downloader,
            announcer,
            self.activation,
            replica_status,
        )
        self.coordinator = ActivationCoordinator(
            self.cluster,
            self.versions,
            self.activation,
            self._follower,
            run_to_completion=self.run_to_completion,
            seconds=settings.weights.replication_seconds,
        )
        self.transfers = WeightTransfers(
            self.versions,
            self.stager,
            self.activation,
            run_to_completion=self.run_to_completion,
        )
        self.replication = ReplicationStatus(self.cluster, self.versions)
        self._drain = Drain(
            readiness=self.readiness,
            admission=self.admission,
            external_trees=self.external_trees,
            cluster=self.cluster,
            rollouts=self.rollouts,
            prompt_kv=self.prompt_kv,
            sessions=self.sessions,
            activation=self.activation,
            move_sender=self.move_sender,
            session_sender=self._session_sender,
            move_seconds=settings.cluster.move_seconds,
        )
        self._background: set[asyncio.Task[Any]] = set()
        self._started_at = self._activated_at = time.monotonic()
        self.serving_observers: list[Callable[[], None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager that starts the server's components, and closes them on exit.

        The engine starts in the background, so that the probes are served during the start.
        """
        self.checkpoints.open()
        starting = asyncio.create_task(self._start_engine())
        lag = asyncio.create_task(watch_loop_lag(self.metrics.server.event_loop_lag.observe))
        try:
            async with (
                self.cluster.running(),
                self.rollouts.running(),
                self.sessions.running(),
                self.activation.sleep.running(),
                self.coordinator.running(),
            ):
                yield
        finally:
            starting.cancel()
            lag.cancel()
            await asyncio.gather(starting, lag, *self._background, return_exceptions=True)
            await self.kv_reuse.close()
            await self.prompt_kv.close()
            await self.engine.stop()
            self.checkpoints.close()
            await asyncio.to_thread(self.traces.close)

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def weights_age_seconds(self) -> float:
        return time.monotonic() - self._activated_at

    def health(self) -> EngineHealth:
        return self.engine.health()

    def is_ready(self) -> bool:
        """Return True if new requests are accepted."""
        return self.readiness.state == "serving"

    async def drain(self, seconds: float) -> None:
        """Stop admission, wait up to `seconds` for admitted work, then cancel what still runs."""
        await self._drain.run(seconds)

    def kill(self) -> None:
        self.readiness.draining = True
        self.engine.kill()

    async def run_to_completion(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` to completion even if the calling task is cancelled.

        Used for state changes, which must not stop half-way.
        """
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return await asyncio.shield(task)

    async def _start_engine(self) -> None:
        try:
            await self.engine.start(self.versions.active.label)
            await self._begin_serving()
        except EngineError as error:
            log.error("the engine did not start: %s", error)
        except Exception:
            log.exception("the server did not start")
            self.engine.kill()

    async def _begin_serving(self) -> None:
        first = self.versions.active
        self.versions.put(replace(first, path=self.engine.info.model_path))
        self.prompt_kv.open()
        self.kv_reuse.cache.open()
        self.readiness.started = True
        for observer in self.serving_observers:
            observer()
        await self._follower.catch_up(self.settings.weights.replication_seconds)
        self.readiness.caught_up = True
        self.cluster.request_heartbeat()

    def _on_weights_changed(self) -> None:
        self._activated_at = time.monotonic()

    def _count_group(self, rollout: Rollout, group: Group, answer: GroupAnswer) -> None:
        self.metrics.record_group(answer, group.sample_seconds)
        self.traces.group(rollout.id, answer, group.began_at, group.sample_seconds)

    def _count_failed(self, rollout: Rollout) -> None:
        """Count in the metrics the groups of a rollout that failed, i.e. that have no answer."""
        self.metrics.rollouts.groups.labels("failed").inc(rollout.num_unanswered)


def _create_registry(settings: ClusterSettings) -> ClusterRegistry:
    return InMemoryRegistry() if settings.redis_url is None else RedisRegistry(settings)
