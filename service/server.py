"""The parts of one server, put together: what each owns is started and ended here, in order."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from coppice.wire.control import EngineStatus, StatusAnswer
from coppice.wire.weights import ActivationAnswer, ActivationMode
from engine.errors import EngineError
from engine.protocol import Engine, Pulse
from service import __version__
from service.activation import Activation
from service.admission import DRAINING_RETRY_SECONDS, Admission
from service.checkpoints import Checkpoints
from service.errors import Draining, EngineGone, NotReady, ServiceError
from service.grouping import Grouping
from service.kv.prompt_kv import PromptKv
from service.kv.sending import Sending
from service.lag import watch_lag
from service.metrics import Metrics
from service.prompts import Prompts
from service.publisher import Publisher
from service.ranks import Ranks
from service.rollout import Rollout
from service.rollouts import Rollouts
from service.scoring import Scoring
from service.settings import Settings
from service.traces import Traces
from service.trees.open_trees import OpenTrees
from service.versions import Version, Versions

log = logging.getLogger(__name__)

STARTING_RETRY_SECONDS = 2.0
Result = TypeVar("Result")


class Server:
    """Created before the event loop; alive inside `running`."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = Metrics()
        self.traces = Traces(settings.trace)
        self.versions = Versions(_first_version(settings))
        self.checkpoints = Checkpoints(
            settings.weights.directory, settings.weights.source_directories
        )
        self.prompts = Prompts(engine)
        self.prompt_kv = PromptKv(
            settings.kv, engine, active_version=lambda: self.versions.active.label
        )
        self.sending = Sending(
            max_transfers=settings.kv.max_transfers,
            max_bytes_per_second=settings.kv.max_bytes_per_second,
            stall_seconds=settings.limits.write_seconds,
            sent=self.metrics.kv_sent_bytes.inc,
        )
        self.admission = Admission(settings.limits)
        self.rollouts = Rollouts(
            engine,
            self.versions,
            self.prompts,
            self.prompt_kv,
            admission=self.admission,
            max_samples_per_request=settings.limits.max_samples_per_request,
            keep_seconds=settings.limits.keep_answers_seconds,
            keep_bytes=settings.limits.keep_answers_bytes,
            grouping=Grouping(
                engine,
                self.prompts,
                Ranks(overtaken_seconds=settings.limits.max_overtaken_seconds),
                longest_lease=settings.limits.max_tree_lease_seconds,
            ),
            ended=self._count,
        )
        self.open_trees = OpenTrees(self.rollouts)
        self.scoring = Scoring(
            engine,
            self.versions,
            self.prompts,
            self.rollouts,
            admission=self.admission,
            max_samples_per_request=settings.limits.max_samples_per_request,
        )
        self.publisher = Publisher(
            engine,
            self.versions,
            self.checkpoints,
            retain_superseded=settings.weights.retain_superseded,
        )
        self.activation = Activation(
            engine, self.versions, self.publisher, self.rollouts, self.prompt_kv
        )
        self._draining = False
        self._background: set[asyncio.Task[Any]] = set()
        self._started_at = time.monotonic()
        self._started = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The engine starts in the background, so that the probes answer meanwhile."""
        self.checkpoints.open()
        starting = asyncio.create_task(self._start_engine())
        lag = asyncio.create_task(watch_lag(self.metrics.lag_seconds.observe))
        try:
            async with self.rollouts.running():
                yield
        finally:
            starting.cancel()
            lag.cancel()
            await asyncio.gather(starting, lag, *self._background, return_exceptions=True)
            self.sending.close()
            await self.prompt_kv.close()
            await self.engine.stop()
            self.prompts.close()
            self.checkpoints.close()
            await asyncio.to_thread(self.traces.close)

    async def activate(
        self, label: str, mode: ActivationMode, *, allow_rollback: bool
    ) -> ActivationAnswer:
        answer = await self.in_background(
            self.activation.activate(label, mode, allow_rollback=allow_rollback)
        )
        self.metrics.activations.labels(mode).inc()
        self.metrics.paused_seconds.observe(answer.paused_seconds)
        return answer

    @property
    def draining(self) -> bool:
        return self._draining

    def pulse(self) -> Pulse:
        return self.engine.pulse()

    async def drain(self, seconds: float) -> None:
        """Takes nothing new, lets what was admitted end, and then ends what still runs.

        Prompt KV is read and renewed meanwhile, and until the last lease is over.
        """
        self._draining = True
        self.admission.close()
        self.open_trees.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.admission.idle()
                await self.prompt_kv.idle()
        self.prompt_kv.begin_closing()
        await self.rollouts.cancel_all()

    def kill(self) -> None:
        self._draining = True
        self.engine.kill()

    def check_ready(self) -> None:
        """Raises the problem for which a new request cannot be served now."""
        if self._draining:
            raise Draining(retry_after_seconds=DRAINING_RETRY_SECONDS)
        self.check_serving()

    def check_serving(self) -> None:
        """As above, for what serves the requests that were taken before a drain."""
        pulse = self.engine.pulse()
        if pulse.stage == "dead" or (self._started and not pulse.alive):
            raise EngineGone(retry_after_seconds=30)
        if not self._started:
            raise NotReady("the model is loading", retry_after_seconds=STARTING_RETRY_SECONDS)

    def check_alive(self) -> Pulse:
        pulse = self.engine.pulse()
        if not pulse.alive:
            # Why it did not start may name a path: that is for the log.
            raise EngineGone(pulse.reason if self._started else "the engine did not start")
        return pulse

    async def in_background(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs to its end even if the caller leaves: a change must not stop half-way."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return await asyncio.shield(task)

    def status(self) -> StatusAnswer:
        active = self.versions.active
        return StatusAnswer(
            version=__version__,
            stage=self.engine.pulse().stage,
            paused=self.activation.paused,
            weights_version=active.label,
            weights_sequence=active.sequence,
            rollouts_running=self.rollouts.num_running,
            samples_running=self.rollouts.num_samples_running,
            uptime_seconds=time.monotonic() - self._started_at,
            engine=self._engine_status() if self._started else None,
            kv=self.prompt_kv.status() if self._started else None,
        )

    def observe(self) -> None:
        """Levels are read when they are asked for, counters are counted when things happen."""
        pulse = self.engine.pulse()
        self.metrics.rollouts_running.set(self.rollouts.num_running)
        self.metrics.samples_running.set(self.rollouts.num_samples_running)
        self.metrics.samples_admitted.set(self.admission.num_samples)
        self.metrics.samples_limit.set(self.settings.limits.max_samples_running)
        self.metrics.paused.set(self.activation.paused)
        self.metrics.draining.set(self._draining)
        self.metrics.ready.set(_passes(self.check_ready))
        self.metrics.live.set(_passes(self.check_alive))
        self.metrics.weights_sequence.set(self.versions.active.sequence)
        self.metrics.engine_up.set(self._started and pulse.alive)
        self.metrics.heartbeat_age.set(pulse.age_seconds)
        self.metrics.kv_observed(self.prompt_kv.status())
        self.metrics.kv_transfers.set(self.sending.num_transfers)
        self.metrics.attention_counted(self.engine.shared_prefix())

    async def _start_engine(self) -> None:
        try:
            await self.engine.start(self.versions.active.label)
        except EngineError as error:
            log.error("the engine did not start: %s", error)
        else:
            first = self.versions.active
            self.versions.put(replace(first, path=self.engine.facts.model_path))
            self.prompt_kv.open()
            self._started = True

    def _count(self, rollout: Rollout) -> None:
        answers = rollout.answers()
        active = self.versions.active.label
        for answer in answers:
            group = rollout.groups[answer.index]
            self.metrics.group_ended(answer, group.sample_seconds, active_version=active)
            self.traces.group(rollout.id, answer, group.began_at, group.sample_seconds)
        # A group that broke off has no answer; its callers are told the problem instead.
        self.metrics.groups.labels("failed").inc(len(rollout.groups) - len(answers))

    def _engine_status(self) -> EngineStatus:
        facts = self.engine.facts
        shown = EngineStatus.model_fields.keys()
        return EngineStatus.model_validate({name: getattr(facts, name) for name in shown})


def _passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except ServiceError:
        return False
    return True


def _first_version(settings: Settings) -> Version:
    """The weights that the engine starts with: not ours to delete, never uploaded."""
    return Version(
        label=settings.weights.initial_version,
        sequence=0,
        state="active",
        path=Path(),  # the engine says where it found them
        num_bytes=0,
        owned=False,
    )
