"""The baseline of an engine without speculation: its file, its measurement and its use."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from engine.attention import register as attention
from engine.attention.settings import AttentionSettings
from engine.cudagraphs.settings import GraphsSettings
from engine.drafter.core.draft_length import DraftLengthPolicy
from engine.errors import StartFailed
from engine.runtime.process_environment import CACHE_ENV
from engine.settings import EngineSettings
from engine.speculation import baseline, startup
from engine.speculation import settings as process_settings
from engine.speculation.baseline import (
    GainPrediction,
    baseline_cache,
    cost_model,
    engine_key,
    overhead_ratio,
    predict_gain,
)
from engine.speculation.controller import Controller
from engine.speculation.core.baseline_methods import (
    StepTimer,
    coppice_begin_baseline,
    coppice_finish_baseline,
)
from engine.speculation.cost import Step, StepCostModel
from engine.speculation.feature import with_prediction
from engine.speculation.settings import SpeculationSettings
from engine.types.feature_stats import FeatureStatus
from tests.engine.seedling import settings as seedling_settings

LOSS = GainPrediction(best_speedup=0.9, overhead=1.5)
GAIN = GainPrediction(best_speedup=2.0, overhead=1.0)
LITTLE = GainPrediction(best_speedup=1.1, overhead=None)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for module in (attention, process_settings):
        monkeypatch.setattr(module, "_settings", None)
    attention.install(AttentionSettings(shared_prefix="off"))
    process_settings.install(SpeculationSettings(mode="auto"))
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    yield


def config(*, model: str = "{}", drafts: int = 0, v2: bool = True, **changed: Any) -> Any:
    """vLLM's config, as far as the key of the baseline depends on it."""
    fields: dict[str, Any] = {"dtype": "bfloat16", "quantization": None, "enforce_eager": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_json_string=lambda: model),
            max_model_len=512 + drafts,
            **(fields | changed),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(world_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        num_speculative_tokens=drafts,
        use_v2_model_runner=v2,
    )


def steps(factor: float = 1.0, *, drafted: float = 1.05) -> list[Step]:
    """A profile whose steps without drafts take `factor` times as long as the baseline's."""
    return [
        Step(
            running=rows,
            context=64 * rows,
            verified=rows * (1 + drafts),
            seconds=factor * 0.01 * rows * (drafted if drafts else 1.0),
        )
        for rows in (1, 4)
        for drafts in (0, 1, 4, 8)
    ]


# File


def test_baseline_is_that_of_the_same_engine_without_drafts() -> None:
    baseline_cache(config()).write(steps())
    assert baseline_cache(config(drafts=8)).read() == steps()


@pytest.mark.parametrize(
    "other", [{"model": "another"}, {"dtype": "float32"}, {"quantization": "fp8"}]
)
def test_baseline_of_another_engine_is_not_used(other: dict[str, Any]) -> None:
    baseline_cache(config()).write(steps())
    assert baseline_cache(config(**other)).read() is None


def test_baseline_of_another_card_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline_cache(config()).write(steps())
    monkeypatch.setattr(current_platform, "get_device_name", lambda *_: "another card")
    assert baseline_cache(config()).read() is None


def test_baseline_of_another_version_of_vllm_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline_cache(config()).write(steps())
    monkeypatch.setattr(baseline, "vllm_version", "0.33.0")
    assert baseline_cache(config()).read() is None


def test_key_names_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "get_device_name", lambda *_: "NVIDIA H100")
    assert engine_key(config())["device"] == "NVIDIA H100"


# Prediction


def test_overhead_is_the_mean_ratio_of_steps_without_drafts() -> None:
    assert overhead_ratio(steps(1.3), steps()) == pytest.approx(1.3)


def test_overhead_is_unknown_if_no_batch_was_measured_in_both() -> None:
    elsewhere = [Step(running=2, context=20000, verified=2, seconds=1.0)]
    assert overhead_ratio(steps(1.3), elsewhere) is overhead_ratio(steps(1.3), []) is None


def test_overhead_is_measured_against_the_cached_baseline() -> None:
    assert cost_model(config(drafts=8), steps(1.3)).overhead == 1.0
    baseline_cache(config()).write(steps())
    assert cost_model(config(drafts=8), steps(1.3)).overhead == pytest.approx(1.3)


def test_engine_that_gains_over_itself_can_lose_against_the_baseline() -> None:
    half_as_fast = steps(2.0, drafted=6.0)
    alone = predict_gain(half_as_fast, None, 8)
    compared = predict_gain(half_as_fast, steps(), 8)
    assert alone is not None and alone.is_sufficient and alone.overhead is None
    assert compared is not None and not compared.is_sufficient
    assert compared.overhead == pytest.approx(2.0)


def slower_batches(factors: dict[int, float]) -> list[Step]:
    return [replace(s, seconds=s.seconds * factors.get(s.running, 1.0)) for s in steps()]


def test_prediction_for_one_sample_has_the_overhead_of_its_own_steps() -> None:
    batches = sorted({step.running for step in steps()} - {1})
    found = predict_gain(slower_batches(dict.fromkeys(batches, 2.0)), steps(), 8)
    alone = predict_gain(steps(), None, 8)
    assert found is not None and alone is not None and found.overhead is not None
    assert found.overhead > 1.2
    assert found.best_speedup == pytest.approx(alone.best_speedup, rel=0.05)


@pytest.mark.parametrize(("speedup", "is_loss"), [(0.997, False), (0.9, True)])
def test_noise_of_the_measurement_is_no_loss(speedup: float, is_loss: bool) -> None:
    assert GainPrediction(best_speedup=speedup, overhead=1.0).is_loss == is_loss


def test_nothing_is_predicted_without_a_profile() -> None:
    assert predict_gain([], steps(), 8) is None


def test_gain_is_reported_relative_to_the_baseline() -> None:
    policy = DraftLengthPolicy(8, Controller(StepCostModel(overhead=1.25)))
    assert policy.controller.gain_ratio == pytest.approx(1 / 1.25)
    policy.reset()
    assert policy.controller.gain_ratio == pytest.approx(1 / 1.25)


# Refusal


def speculation_feature(prediction: GainPrediction | None, mode: Any) -> FeatureStatus:
    """The feature `speculation` of an engine with this prediction."""
    drafts = FeatureStatus(name="speculation", enabled=True, reason="drafts")
    return with_prediction(drafts, mode, prediction)


@pytest.mark.parametrize(
    ("prediction", "mode"), [(GAIN, "auto"), (GAIN, "drafter"), (None, "drafter")]
)
def test_feature_is_unchanged_unless_too_little_is_predicted(
    prediction: GainPrediction | None, mode: str
) -> None:
    found = speculation_feature(prediction, mode)
    assert (found.enabled, found.reason) == (True, "drafts")


@pytest.mark.parametrize(
    ("prediction", "change", "reason"),
    [
        (LOSS, "speculation.mode: siblings, speculation.allow_predicted_loss: true", "0.90 times"),
        (LITTLE, "speculation.mode: siblings", "1.10 times its speed without drafts"),
        (None, "", "no step times could be measured"),
    ],
)
def test_auto_is_off_with_the_reason_if_too_little_is_predicted(
    prediction: GainPrediction | None, change: str, reason: str
) -> None:
    found = speculation_feature(prediction, "auto")
    assert (found.enabled, found.how_to_change) == (False, change)
    assert reason in found.reason


@pytest.mark.parametrize("mode", ["drafter", "siblings"])
def test_explicit_mode_that_is_on_has_the_prediction_as_a_reason(mode: str) -> None:
    found = speculation_feature(LITTLE, mode)
    assert found.enabled and found.reason.startswith("drafts; a single sample with perfect")


async def predicted(
    prediction: GainPrediction, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> GainPrediction | None:
    """Prediction at the start of an engine in which EngineCore has made this one."""

    async def utility(*_: Any) -> tuple[float, float | None]:
        return prediction.best_speedup, prediction.overhead

    monkeypatch.setattr(startup, "_utility", utility)
    return await startup.predict_gain(None, SpeculationSettings(**settings))


@pytest.mark.parametrize("mode", ["drafter", "siblings"])
async def test_start_of_an_explicit_mode_fails_if_a_loss_is_predicted(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartFailed) as refused:
        await predicted(LOSS, monkeypatch, mode=mode)
    assert str(refused.value) == (
        f"speculation.mode {mode} is predicted to lose: a step without drafts takes 1.50 times as "
        "long as in the baseline, an engine without speculation; a single sample with perfect "
        "drafts would run at 0.90 times the baseline's speed; set speculation.mode: off, or "
        "speculation.allow_predicted_loss: true to draft nevertheless"
    )


@pytest.mark.parametrize(
    ("prediction", "settings", "num_warnings"),
    [
        (LOSS, {"mode": "auto"}, 0),
        (LOSS, {"mode": "drafter", "allow_predicted_loss": True}, 1),
        (LITTLE, {"mode": "siblings"}, 1),
        (GAIN, {"mode": "siblings"}, 0),
    ],
)
async def test_other_starts_do_not_fail(
    prediction: GainPrediction,
    settings: dict[str, Any],
    num_warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await predicted(prediction, monkeypatch, **settings) == prediction
    assert [record.levelname for record in caplog.records] == ["WARNING"] * num_warnings


def test_no_loss_is_predicted_without_a_baseline() -> None:
    """Drafts of one token that double the time of a step still leave the length 0."""
    found = predict_gain(steps(drafted=99.0), None, 8)
    assert found is not None and not found.is_loss and not found.is_sufficient


# Measurement


@dataclass
class Scheduler:
    """Steps of given rows, each of which takes as many seconds as it has rows."""

    dynamic_sd_lookup: list[int] | None = field(default_factory=lambda: [3, 2, 1])
    requests: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0

    def add(self, name: str, *, computed: int) -> None:
        self.requests[name] = SimpleNamespace(
            num_computed_tokens=computed, num_prompt_tokens=8, num_tokens=9
        )

    def schedule(self, names: str = "") -> Any:
        assert self.dynamic_sd_lookup in (None, [0, 0, 0]), "nothing is drafted"
        self.now += len(names)
        for name in names:
            self.requests[name].num_computed_tokens += 1
        return SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(names, 1), scheduled_spec_decode_tokens={}
        )


def timed(scheduler: Scheduler, *rows: str) -> list[Step]:
    timer = StepTimer(scheduler, clock=lambda: scheduler.now)
    timer.attach()
    for names in rows:
        scheduler.schedule(names)
    return timer.detach()


def scheduler_with(**computed: int) -> Scheduler:
    made = Scheduler()
    for name, tokens in computed.items():
        made.add(name, computed=tokens)
    return made


def test_decode_steps_are_timed_by_their_number_of_rows() -> None:
    scheduler = scheduler_with(a=8, b=8)
    found = timed(scheduler, *["ab"] * 6, *["a"] * 6)
    assert {(step.running, step.verified, step.seconds) for step in found} == {
        (2, 2, 2.0),
        (1, 1, 1.0),
    }


def test_steps_that_prefill_and_those_after_a_change_of_rows_are_not_timed() -> None:
    assert timed(scheduler_with(a=8, b=2), *["ab"] * 6) == []
    assert timed(scheduler_with(a=8, b=8), "a", "ab", "a", "ab", "b", "ab") == []


def test_scheduler_is_as_before_after_the_measurement() -> None:
    scheduler = scheduler_with(a=8)
    schedule = scheduler.schedule
    timed(scheduler, "a")
    assert scheduler.schedule == schedule and scheduler.dynamic_sd_lookup == [3, 2, 1]


def core(**given: Any) -> Any:
    scheduler = scheduler_with(a=8)
    return SimpleNamespace(vllm_config=config(**given), scheduler=scheduler)


def test_baseline_is_measured_once() -> None:
    engine = core(drafts=8)
    assert coppice_begin_baseline(engine, False)
    for _ in range(8):
        engine.scheduler.schedule("a")
    assert coppice_finish_baseline(engine) == 1
    assert not coppice_begin_baseline(engine, False)
    assert coppice_begin_baseline(engine, True)


def test_engine_whose_draft_model_runs_in_every_step_measures_no_baseline() -> None:
    assert not coppice_begin_baseline(core(drafts=8, v2=False), False)
    assert coppice_begin_baseline(core(v2=False), False)


@pytest.mark.exhaustive
@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
async def test_engine_without_speculation_measures_the_baseline(tmp_path: Path) -> None:
    from engine.measure_baseline import measure

    engine: EngineSettings = seedling_settings(max_sequences=4, cache_directory=tmp_path)
    found = await measure(
        engine,
        attention=AttentionSettings(shared_prefix="off"),
        speculation=SpeculationSettings(mode="siblings"),
        graphs=GraphsSettings(),
    )
    [file] = (tmp_path / "speculation").iterdir()
    assert found > 0 and '"speculation": "off"' in file.read_text()
