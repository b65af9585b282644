"""Feature class of speculative decoding: mode, start, predicted gain and counters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from engine.errors import StartFailed
from engine.feature_base import (
    CorePart,
    EngineFeature,
    Ping,
    StartSettings,
    WorkerPart,
    feature_status,
)
from engine.speculation import settings as process_settings
from engine.speculation import startup
from engine.speculation.baseline import GainPrediction
from engine.speculation.core import baseline_methods, engine_core_methods
from engine.speculation.cost import MIN_SPEEDUP
from engine.speculation.counters import COUNTERS, to_speculation_stats
from engine.speculation.settings import ENVIRONMENT, SpeculationSettings
from engine.speculation.worker import speculator_factory, worker_methods
from engine.types.feature_stats import FeatureStatus, SpeculationStats
from engine.types.info import EngineInfo

DRAFTS: Final = {
    "auto": "drafts come from sibling samples where a profile shows a gain",
    "siblings": "drafts come from sibling samples",
    "drafter": "drafts come from a draft model",
}


def _install() -> None:
    process_settings.install(process_settings.settings_of_environment())
    if not current_platform.is_cpu():
        speculator_factory.install()


class Speculation(EngineFeature):
    """Drafts of sibling samples or of a draft model, and the prediction of their gain."""

    name = "speculation"
    covers = {
        "speculative_config": "speculation.mode",
        "spec_method": "speculation.mode",
        "spec_tokens": "speculation.longest_draft",
    }
    core = CorePart(
        methods=(*engine_core_methods.METHODS, *baseline_methods.METHODS),
        counted=engine_core_methods.counted,
    )
    worker = WorkerPart(
        install=_install,
        methods=worker_methods.METHODS,
        counted=COUNTERS.read,
        on_weights_changed=worker_methods.on_weights_changed,
    )
    stats: SpeculationStats = SpeculationStats()

    def __init__(self, settings: StartSettings) -> None:
        super().__init__(settings)
        self._requested = settings.of(SpeculationSettings)
        self._why_off = startup.why_off(self._requested, settings.engine)
        self._prediction: GainPrediction | None = None
        self._is_started = False

    @property
    def _usable(self) -> SpeculationSettings:
        """Settings without a mode that cannot be used."""
        return self.settings.of(SpeculationSettings)

    def check(self) -> None:
        """Refuse an explicit mode with several engines, and replace one that cannot be used."""
        engine, mode = self.settings.engine, self._requested.mode
        if engine.data_parallel_size > 1 and mode in ("siblings", "drafter"):
            raise StartFailed(
                f"engine.data_parallel_size and speculation.mode {mode} exclude each other: step "
                "times and drafts are those of one engine; set speculation.mode: off"
            )
        self.settings.replace(startup.resolve_mode(self._requested, engine))

    def needs_batch_limits(self, *, on_cpu: bool) -> bool:
        return self._usable.mode != "off"

    def set_arguments(self, arguments: AsyncEngineArgs, *, on_cpu: bool) -> None:
        if self._usable.mode != "off":
            startup.set_speculative_config(arguments, self._usable, on_cpu=on_cpu)

    def environment(self) -> Mapping[str, str]:
        usable = self._usable
        variables = {ENVIRONMENT: usable.model_dump_json(include={"mode", "longest_draft"})}
        if usable.mode != "off":
            # Positions beyond the model's context are only reserved for drafts, never computed.
            variables["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        return variables

    def accept(self, config: Any) -> bool:
        reason = startup.find_obstacle(config, self._usable)
        if reason is None:
            return True
        self._why_off = reason
        self.settings.replace(self._usable.model_copy(update={"mode": "off"}))
        return False

    async def start(self, info: EngineInfo) -> None:
        """Start drafting from siblings, and predict the gain of whatever drafts."""
        settings = self._usable
        if settings.mode != "off":
            with self.engine.phases.phase("calibrating"):
                await startup.start_drafting(self.engine.llm, settings, info)
        self._prediction = await startup.predict_gain(self.engine.llm, settings)
        self._is_started = True

    def status(self) -> Iterable[FeatureStatus]:
        if self._why_off is not None:
            how = "speculation.mode: siblings" if self._requested.mode == "off" else ""
            return [feature_status(self.name, False, self._why_off, how)]
        mode = self._requested.mode
        drafts = feature_status(self.name, True, DRAFTS[mode], "speculation.mode: off")
        if self._is_started:
            drafts = with_prediction(drafts, mode, self._prediction)
        return [drafts]

    def on_ping(self, pings: Sequence[Ping]) -> None:
        """Take the counters of the first engine: several do not draft."""
        counts = self.counts(pings)[0]
        self.stats = to_speculation_stats(counts["core"] or counts["ranks"][0])


def with_prediction(
    drafts: FeatureStatus, mode: str, prediction: GainPrediction | None
) -> FeatureStatus:
    """Status of drafts that are on, according to their predicted gain.

    Without a prediction `auto` drafts nothing.
    """
    if prediction is not None and prediction.is_sufficient:
        return drafts
    if mode != "auto":
        return replace(drafts, reason=f"{drafts.reason}; {prediction}") if prediction else drafts
    if prediction is None:
        return feature_status("speculation", False, "auto: no step times could be measured")
    how = "speculation.mode: siblings"
    if prediction.is_loss:
        how += ", speculation.allow_predicted_loss: true"
    reason = f"auto: {prediction}, and {MIN_SPEEDUP} times is required"
    return feature_status("speculation", False, reason, how)
