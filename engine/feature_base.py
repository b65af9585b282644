"""Base class of the engine's optional features: their hooks in all of vLLM's processes.

A feature is a folder with a subclass of `EngineFeature` in its module `feature`. The list in
`engine.features` is the only place that names the class.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar

from engine.errors import StartFailed
from engine.runtime.engine_protocols import RunningEngine, SleepListener
from engine.settings import EngineSettings
from engine.settings.base import Section
from engine.types.feature_stats import FeatureStatus
from engine.types.info import EngineInfo
from engine.types.samples import FinishedListener

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

Method = Callable[..., Any]
Kind = TypeVar("Kind", bound=Section)


class FeatureCounts(TypedDict):
    """Counters of a feature in one EngineCore and in its workers; None if it counts nothing."""

    core: Any
    ranks: list[Any]


class Ping(TypedDict):
    """Answer of one EngineCore to a heartbeat. `features` has the counters by feature."""

    pid: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    features: dict[str, FeatureCounts]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePart:
    """Additions of a feature to EngineCore, which it calls between two steps.

    install: installs the hooks in vLLM, at the start of the process.
    methods: functions that become methods of EngineCore, for calls by the service.
    counted: counters for the heartbeat, as values of msgpack.
    on_prefix_cache_reset: called with EngineCore and the ids of the blocks that stay in the cache.
    """

    install: Callable[[], None] | None = None
    methods: tuple[Method, ...] = ()
    counted: Callable[[Any], Any] | None = None
    on_prefix_cache_reset: Callable[[Any, Set[int]], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPart:
    """Additions of a feature to the workers. EngineCore may be in the same process.

    install: installs the hooks in vLLM, at the start of the process.
    methods: functions that become methods of the worker, for calls by the service; they must not
        raise.
    counted: counters for the heartbeat, as values of msgpack.
    on_weights_changed: called with the worker when the weights of the model are other ones.
    """

    install: Callable[[], None] | None = None
    methods: tuple[Method, ...] = ()
    counted: Callable[[], Any] | None = None
    on_weights_changed: Callable[[Any], None] | None = None


class StartSettings:
    """Settings of an engine's start. A feature replaces its own by those that can be used."""

    def __init__(self, *, engine: EngineSettings, **sections: Section | None) -> None:
        self.engine = engine
        self._sections = {type(section): section for section in sections.values()}

    def of(self, kind: type[Kind]) -> Kind:
        """Section of a feature; the defaults if none was given."""
        section = self._sections.get(kind)
        return section if isinstance(section, kind) else kind()

    def replace(self, section: Section) -> None:
        self._sections[type(section)] = section


class EngineFeature(SleepListener):
    """A feature of one engine in the service's process. Its hooks do nothing by default.

    They are called in this order, those of a start in the order of `engine.features`:

    check: raises StartFailed if other settings exclude the feature.
    open: reads and writes files, in a thread, before vLLM's processes start.
    needs_batch_limits: true if the next hook needs vLLM's limits of a batch.
    set_arguments: sets vLLM's engine arguments, beside those that are engine settings.
    environment: variables of vLLM's processes, which all ranks of an engine must share.
    accept: true if vLLM's configuration suits the feature. Otherwise it has changed the settings,
        and the configuration is made again.
    prepare: asks the processes, before a request has run, what the feature can do.
    info_fields: fields of `EngineInfo` that the feature determines.
    start: starts the feature, once the engine has generated its first tokens.
    status: entries of the status document.
    run: runs until it is cancelled, while the engine serves.
    on_ping: takes the counters of a heartbeat into `stats`.
    finished_listener: receives the samples that finish.
    stop: ends the feature, before vLLM's processes end.
    """

    name: ClassVar[str]
    covers: ClassVar[Mapping[str, str]] = {}
    """Arguments of vLLM that its settings cover, which therefore cannot be set, by argument."""
    core: ClassVar[CorePart] = CorePart()
    worker: ClassVar[WorkerPart] = WorkerPart()
    engine: RunningEngine
    """Set before `prepare`."""
    stats: object = None
    """Counters of the last heartbeat, as a type of `engine.types.feature_stats`."""
    interface: object = None
    """Operations of the feature for the service, while it is on."""

    def __init__(self, settings: StartSettings) -> None:
        self.settings = settings

    def check(self) -> None:
        return

    def open(self, model: Path) -> None:
        return

    def needs_batch_limits(self, *, on_cpu: bool) -> bool:
        return False

    def set_arguments(self, arguments: "AsyncEngineArgs", *, on_cpu: bool) -> None:
        return

    def environment(self) -> Mapping[str, str]:
        return {}

    def accept(self, config: Any) -> bool:
        return True

    async def prepare(self) -> None:
        return

    def info_fields(self) -> Mapping[str, Any]:
        return {}

    async def start(self, info: EngineInfo) -> None:
        return

    def status(self) -> Iterable[FeatureStatus]:
        return ()

    async def run(self) -> None:
        return

    def on_ping(self, pings: Sequence[Ping]) -> None:
        return

    def counts(self, pings: Sequence[Ping]) -> list[FeatureCounts]:
        """Counters of this feature, one entry per data-parallel engine."""
        return [ping["features"][self.name] for ping in pings]

    def finished_listener(self) -> FinishedListener | None:
        return None

    async def stop(self) -> None:
        return


def feature_status(name: str, enabled: object, reason: str, how: str = "") -> FeatureStatus:
    return FeatureStatus(name=name, enabled=bool(enabled), reason=reason, how_to_change=how)


def refuse_several_machines(settings: EngineSettings, reason: str, change: str) -> None:
    """Raise StartFailed if ranks may be on several machines. `change` is the setting to change."""
    if not settings.uses_several_machines:
        return
    setting = f"engine.nnodes is {settings.nnodes}"
    if settings.uses_ray:
        setting = "engine.distributed_executor_backend is ray"
    raise StartFailed(f"{reason}, and {setting}; set {change}")
