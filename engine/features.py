"""List of the engine's optional features, and dispatch of their hooks in each process."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Final, TypeVar

from vllm.engine.arg_utils import AsyncEngineArgs

from engine.adapters.feature import Adapters
from engine.attention.feature import SharedPrefixAttention
from engine.cudagraphs.feature import CudaGraphPlan
from engine.drafter.feature import DraftModel
from engine.feature_base import EngineFeature, Ping, StartSettings
from engine.kv_lifetime.feature import KeptKv, SessionKvRetention
from engine.kv_transfer.feature import KvOffloading, PromptKvExport
from engine.runtime.engine_protocols import RunningEngine, SleepListener
from engine.runtime.feature_guard import attempt
from engine.speculation.feature import Speculation
from engine.types.feature_stats import FeatureStatus
from engine.types.info import EngineInfo
from engine.types.samples import FinishedListener
from engine.vllm_options import (
    AsyncScheduling,
    ExpertParallel,
    Quantization,
    QuantizedKvCache,
    RandomWeights,
    ReasoningParser,
    RoutedExperts,
    ToolParser,
)
from engine.weights.transfer_feature import WeightTransfer

FEATURES: Final[tuple[type[EngineFeature], ...]] = (
    SharedPrefixAttention,
    DraftModel,  # starts before the gain of its drafts is predicted
    Speculation,
    CudaGraphPlan,
    RandomWeights,
    Adapters,
    PromptKvExport,
    KvOffloading,
    SessionKvRetention,
    KeptKv,
    WeightTransfer,
    Quantization,
    QuantizedKvCache,
    ExpertParallel,
    RoutedExperts,
    AsyncScheduling,
    ToolParser,
    ReasoningParser,
)
"""All features, in the order of the status document."""
Wanted = TypeVar("Wanted", bound=EngineFeature)
Stats = TypeVar("Stats")


# In EngineCore and the workers


def install_in_core() -> None:
    _call(feature.core.install for feature in FEATURES)


def install_in_worker() -> None:
    _call(feature.worker.install for feature in FEATURES)


def _call(installs: Iterator[Callable[[], None] | None]) -> None:
    for install in installs:
        if install is not None:
            install()


def core_methods() -> Iterator[Callable[..., Any]]:
    return itertools.chain.from_iterable(feature.core.methods for feature in FEATURES)


def worker_methods() -> Iterator[Callable[..., Any]]:
    return itertools.chain.from_iterable(feature.worker.methods for feature in FEATURES)


def core_counts(core: Any) -> dict[str, Any]:
    """Counters of the features in EngineCore, by feature."""
    counting = ((feature.name, feature.core.counted) for feature in FEATURES)
    return {name: counted(core) for name, counted in counting if counted is not None}


def worker_counts() -> dict[str, Any]:
    """Counters of the features in a worker, by feature."""
    counting = ((feature.name, feature.worker.counted) for feature in FEATURES)
    return {name: counted() for name, counted in counting if counted is not None}


def on_prefix_cache_reset(core: Any, kept_blocks: Set[int]) -> None:
    for feature in FEATURES:
        if feature.core.on_prefix_cache_reset is not None:
            feature.core.on_prefix_cache_reset(core, kept_blocks)


def on_weights_changed(worker: Any) -> None:
    """Notify the features of a worker, none of which can make the load fail."""
    for feature in FEATURES:
        if feature.worker.on_weights_changed is not None:
            attempt(feature.worker.on_weights_changed, worker)


# In the service's process


class Features(SleepListener):
    """The features of one engine. Their hooks are called in the order of the list."""

    def __init__(self, settings: StartSettings) -> None:
        self._all = tuple(feature(settings) for feature in FEATURES)

    def of(self, kind: type[Wanted]) -> Wanted:
        return next(feature for feature in self._all if isinstance(feature, kind))

    def interface(self, name: str) -> Any:
        """Interface of the feature with this name; None while it is off."""
        return next(feature.interface for feature in self._all if feature.name == name)

    def stats(self, kind: type[Stats]) -> Stats:
        """Counters of this type, of the last heartbeat."""
        return next(each.stats for each in self._all if isinstance(each.stats, kind))

    def check(self) -> None:
        for feature in self._all:
            feature.check()

    def open(self, model: Path) -> None:
        for feature in self._all:
            feature.open(model)

    def needs_batch_limits(self, *, on_cpu: bool) -> bool:
        return any(feature.needs_batch_limits(on_cpu=on_cpu) for feature in self._all)

    def set_arguments(self, arguments: AsyncEngineArgs, *, on_cpu: bool) -> None:
        for feature in self._all:
            feature.set_arguments(arguments, on_cpu=on_cpu)

    def environment(self) -> dict[str, str]:
        variables = (feature.environment().items() for feature in self._all)
        return dict(itertools.chain.from_iterable(variables))

    def accept(self, config: Any) -> bool:
        """False if a feature has changed the settings, so that the configuration is made again."""
        return all(feature.accept(config) for feature in self._all)

    async def prepare(self, engine: RunningEngine) -> None:
        for feature in self._all:
            feature.engine = engine
            await feature.prepare()

    def info_fields(self) -> dict[str, Any]:
        fields = (feature.info_fields().items() for feature in self._all)
        return dict(itertools.chain.from_iterable(fields))

    async def start(self, info: EngineInfo) -> None:
        for feature in self._all:
            await feature.start(info)

    def status(self) -> tuple[FeatureStatus, ...]:
        return tuple(itertools.chain.from_iterable(each.status() for each in self._all))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for feature in self._all:
                tasks.create_task(feature.run())

    def on_ping(self, pings: Sequence[Ping]) -> None:
        for feature in self._all:
            feature.on_ping(pings)

    def finished_listeners(self) -> list[FinishedListener]:
        found = (feature.finished_listener() for feature in self._all)
        return [listener for listener in found if listener is not None]

    async def stop(self) -> None:
        for feature in self._all:
            await feature.stop()

    def on_sleep(self, *, drops_weights: bool) -> None:
        for feature in self._all:
            feature.on_sleep(drops_weights=drops_weights)

    async def on_wake(self) -> None:
        for feature in self._all:
            await feature.on_wake()
