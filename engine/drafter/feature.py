"""Feature class of the online-trained draft model: start, training, counters and sleep."""

from collections.abc import Sequence
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs

from engine.drafter.core.engine_core_methods import METHODS, counted
from engine.drafter.service.checkpoint_dir import DrafterDir
from engine.drafter.service.drafter import Drafter
from engine.drafter.service.initial_model import open_drafter_dir
from engine.feature_base import (
    CorePart,
    EngineFeature,
    Ping,
    StartSettings,
    WorkerPart,
    refuse_several_machines,
)
from engine.speculation.settings import SpeculationSettings
from engine.speculation.worker.speculator_factory import SPECULATORS
from engine.types.info import EngineInfo
from engine.types.samples import FinishedListener
from engine.weights.checkpoint import NO_TENSORS, read_base_checkpoint


def register_speculator() -> None:
    """Have Model Runner V2 draft by `DraftSpeculator` in the mode `drafter`."""
    SPECULATORS["drafter"] = "engine.drafter.worker.draft_speculator:DraftSpeculator"


class DraftModel(EngineFeature):
    """Draft model with its checkpoints, which a process of its own may train."""

    name = "drafter"
    covers = {"spec_model": "speculation.drafter"}
    core = CorePart(methods=METHODS, counted=counted)
    worker = WorkerPart(install=register_speculator)
    interface: Drafter | None = None

    def __init__(self, settings: StartSettings) -> None:
        super().__init__(settings)
        self._dir: DrafterDir | None = None
        self._is_asleep = False

    def check(self) -> None:
        if self.settings.of(SpeculationSettings).mode == "drafter":
            refuse_several_machines(
                self.settings.engine,
                "checkpoints of the draft model are files of one machine",
                "speculation.mode to siblings or off",
            )

    def open(self, model: Path) -> None:
        """Open the drafter directory and set the `drafter` setting to its serving drafter."""
        speculation, engine = self.settings.of(SpeculationSettings), self.settings.engine
        if speculation.mode != "drafter":
            return
        served = NO_TENSORS if engine.has_random_weights else read_base_checkpoint(model)
        self._dir = open_drafter_dir(
            engine.cache_directory / "drafter",
            speculation.drafter,
            model,
            served,
            ranks=engine.tensor_parallel_size,
        )
        update = {"drafter": self._dir.start}
        self.settings.replace(speculation.model_copy(update=update))

    def set_arguments(self, arguments: AsyncEngineArgs, *, on_cpu: bool) -> None:
        """Keep the weights of the draft model in host memory at each level of sleep."""
        if arguments.enable_sleep_mode:
            arguments.sleep_preserve_parameter_names = ["draft.*"]

    async def start(self, info: EngineInfo) -> None:
        if self._dir is None:
            return
        self.interface = Drafter(
            self.settings.of(SpeculationSettings),
            self._dir,
            self.engine.llm,
            info,
            lambda: self._is_asleep,
        )
        await self.interface.start_drafting()

    async def run(self) -> None:
        if self.interface is not None:
            await self.interface.run()

    def on_ping(self, pings: Sequence[Ping]) -> None:
        """Pass on the answer of the first engine: several do not draft."""
        if self.interface is not None:
            self.interface.on_ping(self.counts(pings)[0]["core"], pings[0]["num_running"])

    def finished_listener(self) -> FinishedListener | None:
        is_training = self.interface is not None and self.interface.is_training
        return self.interface.on_sample_finished if self.interface and is_training else None

    def on_sleep(self, *, drops_weights: bool) -> None:
        self._is_asleep = True

    async def on_wake(self) -> None:
        self._is_asleep = False

    async def stop(self) -> None:
        if self.interface is not None:
            await self.interface.close()
        if self._dir is not None:
            self._dir.close()
