"""Class `Server`: creates all components, and starts and closes them in order."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from engine.errors import EngineError
from engine.protocol import Engine
from engine.types.info import EngineHealth
from service.checkpoint_store import CheckpointStore
from service.cluster.build import build_cluster
from service.cluster.registry import ClusterRegistry
from service.config.settings import Settings
from service.drain import Drain
from service.handoff.build import build_handoff
from service.http.build import build_http
from service.kv.build import build_kv
from service.observability.build import build_observability
from service.observability.metrics import watch_loop_lag
from service.readiness import Readiness
from service.rollouts.build import build_rollouts
from service.sessions.build import build_sessions
from service.uncancellable_tasks import StateChanges
from service.weights.build import build_weights
from service.weights_versions import Version, Versions, first_version

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Server:
    """One replica of the service: creates its components around the engine, starts and closes them.

    Each component knows only those above it in `__init__`. Created before the event loop starts;
    active inside `running`. A `registry` passed in is shared with other servers of this process.
    """

    def __init__(
        self, settings: Settings, engine: Engine, registry: ClusterRegistry | None = None
    ) -> None:
        self.settings, self.engine = settings, engine
        versions = self.versions = Versions(_first_version(settings))
        readiness = self.readiness = Readiness(engine)
        checkpoints = self.checkpoints = CheckpointStore(
            settings.weights.directory, settings.weights.source_directories
        )
        changes = self._state_changes = StateChanges()
        observability = self._observability = build_observability(settings.trace)
        metrics = self.metrics = observability.metrics
        http = self._http = build_http(settings.limits)
        cluster = self._cluster = build_cluster(
            settings, metrics.cluster, readiness, versions, registry
        )
        kv = self._kv = build_kv(settings.kv, engine, metrics.prompt_kv, versions, cluster)
        rollouts = self._rollouts = build_rollouts(
            settings, engine, observability, versions, checkpoints, cluster, kv
        )
        sessions = self.sessions = build_sessions(
            settings, engine, metrics.sessions, http, cluster, rollouts
        )
        weights = self._weights = build_weights(
            settings, engine, metrics, versions, checkpoints, changes, cluster, kv, rollouts
        )
        handoff = self.handoff = build_handoff(
            settings, engine, metrics, versions, cluster, rollouts, sessions, weights
        )
        seconds = settings.cluster.handoff_seconds
        self._drain = Drain(readiness, cluster, kv, rollouts, sessions, weights, handoff, seconds)
        self._name_components()
        self._started_at = time.monotonic()
        self.serving_observers: list[Callable[[], None]] = []

    def _name_components(self) -> None:
        """Set the attributes by which the routes find the components."""
        self.traces = self._observability.traces
        self.threads, self.bodies = self._http.threads, self._http.bodies
        self.cluster = self._cluster.membership
        self.idempotency_keys = self._cluster.idempotency_keys
        self.prompt_kv, self.kv_reuse = self._kv.prompt_kv, self._kv.kv_reuse
        self.kv_downloads = self._kv.kv_downloads
        self.rollouts, self.scoring = self._rollouts.manager, self._rollouts.scoring
        self.admission, self.tokenizer = self._rollouts.admission, self._rollouts.tokenizer
        self.adapters, self.external_trees = self._rollouts.adapters, self._rollouts.external_trees
        self.stager, self.drafters = self._weights.stager, self._weights.drafters
        self.activation, self.coordinator = self._weights.activation, self._weights.coordinator
        self.transfers, self.replication = self._weights.transfers, self._weights.replication

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager that starts the server's components, and closes them on exit.

        The engine starts in the background, so that the probes are served during the start.
        """
        async with AsyncExitStack() as stack:
            self.checkpoints.open()
            self._close_on_exit(stack)
            await stack.enter_async_context(_background(self._start_engine()))
            lag = watch_loop_lag(self.metrics.server.event_loop_lag.observe)
            await stack.enter_async_context(_background(lag))
            await stack.enter_async_context(self.cluster.running())
            await stack.enter_async_context(self.rollouts.running())
            await stack.enter_async_context(self.sessions.running())
            await stack.enter_async_context(self.activation.sleep.running())
            await stack.enter_async_context(self.coordinator.running())
            yield

    def _close_on_exit(self, stack: AsyncExitStack) -> None:
        """Close what has no task of its own, in the reverse order of these lines."""
        stack.push_async_callback(asyncio.to_thread, self.traces.close)
        stack.callback(self.checkpoints.close)
        stack.push_async_callback(self.engine.stop)
        stack.push_async_callback(self.prompt_kv.close)
        stack.push_async_callback(self.kv_reuse.close)
        stack.push_async_callback(self._state_changes.wait_until_done)

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started_at

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
        """Run a state change to completion even if the calling task is cancelled."""
        return await self._state_changes.run(work)

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
        self.kv_reuse.spans.open()
        self.readiness.started = True
        for observer in self.serving_observers:
            observer()
        await self._weights.reconciler.catch_up(self.settings.weights.replication_seconds)
        self.readiness.caught_up = True
        self.cluster.request_heartbeat()


def _first_version(settings: Settings) -> Version:
    return first_version(
        settings.weights.initial_version, is_random=settings.engine.has_random_weights
    )


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Context manager of a task, which is cancelled on exit."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
