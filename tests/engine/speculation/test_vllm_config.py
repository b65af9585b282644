"""vLLM's config for speculation, resolution of `auto`, and the profile cache."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm import envs
from vllm.config.speculative import NgramGPUTypes
from vllm.platforms import current_platform

from engine.attention import register
from engine.attention.settings import AttentionSettings
from engine.errors import StartFailed
from engine.feature_base import StartSettings
from engine.features import Features
from engine.launch import processes
from engine.launch.arguments import WORKER_EXTENSION
from engine.speculation import startup
from engine.speculation.baseline import profile_key
from engine.speculation.cost import Profile, ProfileCache, Step, draft_lengths, profile_batches
from engine.speculation.feature import Speculation
from engine.speculation.settings import SpeculationSettings
from engine.speculation.startup import find_obstacle, resolve_mode
from engine.types.feature_stats import FeatureStatus
from kernels.draft_index.compiled_store import is_built
from tests.engine.made_arguments import engine_arguments
from tests.engine.seedling import MODEL, settings

SIBLINGS = SpeculationSettings(mode="siblings", longest_draft=6)


@pytest.mark.parametrize(("asked", "served"), [(512, 512), (None, 4096)])
def test_longest_draft_fits_after_the_served_context(asked: int | None, served: int) -> None:
    engine = settings(max_context_tokens=asked)
    arguments = engine_arguments(engine, MODEL, speculation=SIBLINGS, on_cpu=True)
    assert arguments.max_model_len == served + 6


@pytest.mark.parametrize("speculation", [SIBLINGS, SpeculationSettings()])
def test_context_longer_than_that_of_the_model_is_refused(speculation: SpeculationSettings) -> None:
    """With or without drafts: room for drafts beyond the model's limit is never sampled into."""
    with pytest.raises(ValueError, match="max_model_len"):
        arguments = engine_arguments(
            settings(max_context_tokens=5000), MODEL, speculation=speculation, on_cpu=True
        )
        arguments.create_model_config()


def test_disabled_speculation_adds_nothing_to_the_vllm_config() -> None:
    arguments = engine_arguments(settings(max_context_tokens=512), MODEL, on_cpu=True)
    assert (arguments.max_model_len, arguments.speculative_config) == (512, None)


def test_uniform_lengths_keep_vllm_from_padding() -> None:
    arguments = engine_arguments(settings(), MODEL, speculation=SIBLINGS, on_cpu=True)
    config = arguments.speculative_config
    assert config is not None
    assert config["num_speculative_tokens_per_batch_size"] == [(1, 64, 6)]


@pytest.mark.skipif(not is_built(), reason="the draft store was not built")
def test_auto_uses_the_profile_on_cpu_and_is_off_with_pipeline_parallel() -> None:
    auto = SpeculationSettings(mode="auto")
    assert resolve_mode(auto, settings()).mode == "auto"
    assert resolve_mode(auto, settings(pipeline_parallel_size=2)).mode == "off"
    assert resolve_mode(SIBLINGS, settings(pipeline_parallel_size=2)).mode == "off"


def test_profile_is_cached_per_configuration(tmp_path: Path) -> None:
    steps = [Step(running=1, context=64, verified=2, seconds=0.01)]
    ProfileCache(tmp_path, {"model": "a"}).write(steps)
    assert ProfileCache(tmp_path, {"model": "a"}).read() == steps
    assert ProfileCache(tmp_path, {"model": "b"}).read() is None
    for file in tmp_path.iterdir():
        file.write_text("{")
    assert ProfileCache(tmp_path, {"model": "a"}).read() is None


def test_profile_has_the_median_of_every_cell_and_length() -> None:
    profile = Profile(6)
    lengths = {profile.next_length(4) for _ in range(12)}
    assert lengths == {0, 1, 2, 4, 6}
    for seconds in (0.01, 0.02, 9.0):
        profile.record_step(running=4, context=40, verified=8, seconds=seconds)
    profile.record_step(running=4, context=40, verified=12, seconds=1.0)
    [step] = profile.steps()
    assert (step.running, step.verified, step.seconds) == (4, 8, 0.02)


def test_profile_uses_batch_sizes_of_the_engine() -> None:
    small = profile_batches(max_sequences=8, max_context_tokens=256, max_draft_tokens=6)
    assert small
    assert all(batch.running <= 8 and batch.prompt < 256 for batch in small)


def gpu_arguments(speculation: SpeculationSettings = SIBLINGS) -> Any:
    return engine_arguments(settings(), MODEL, speculation=speculation, on_cpu=False)


def test_siblings_on_a_gpu_keep_the_second_model_runner_and_async_scheduling() -> None:
    config = gpu_arguments().create_engine_config()
    assert config._get_v2_model_runner_unsupported_features() == []
    assert config.speculative_config.method in get_args(NgramGPUTypes)
    assert config.speculative_config.uses_dynamic_speculative_decoding()


def test_graphs_are_captured_for_the_profiled_lengths() -> None:
    schedule = gpu_arguments().speculative_config["num_speculative_tokens_per_batch_size"]
    assert schedule == [(1, 1, 6), (2, 2, 4), (3, 3, 2), (4, 4, 1), (5, 64, 0)]
    assert sorted(length for *_, length in schedule) == draft_lengths(6)


AUTO = SpeculationSettings(mode="auto")


@pytest.mark.parametrize(
    ("variable", "unsupported", "reason"),
    [
        ("0", [], "VLLM_USE_V2_MODEL_RUNNER is 0"),
        (None, ["dual batch overlap"], "V2 does not support dual batch overlap"),
        (None, [], "V2 needs Triton"),
    ],
)
def test_first_model_runner_on_a_gpu_is_a_reason_not_to_draft(
    variable: str | None, unsupported: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs, "VLLM_USE_V2_MODEL_RUNNER", variable and False)
    config = SimpleNamespace(
        use_v2_model_runner=False,
        speculative_config=SimpleNamespace(method=startup.GPU_METHOD),
        _get_v2_model_runner_unsupported_features=lambda: unsupported,
    )
    assert find_obstacle(config, AUTO) == f"vLLM uses Model Runner V1 here, as {reason}"
    with pytest.raises(StartFailed, match=f"siblings is not possible on a GPU: .*{reason}"):
        find_obstacle(config, SIBLINGS)


@pytest.mark.parametrize(
    ("mode", "method", "v2"),
    [("auto", startup.GPU_METHOD, True), ("auto", "custom_class", False)],
)
def test_sibling_drafts_need_the_second_model_runner_on_gpus_only(
    mode: Any, method: str, v2: bool
) -> None:
    config = SimpleNamespace(
        use_v2_model_runner=v2, speculative_config=SimpleNamespace(method=method)
    )
    assert find_obstacle(config, SpeculationSettings(mode=mode)) is None


def test_drafter_needs_the_second_model_runner_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's first runner would draft with its own loop."""
    drafter = SpeculationSettings(mode="drafter", drafter=Path("/drafter"))
    config = SimpleNamespace(
        use_v2_model_runner=False,
        speculative_config=SimpleNamespace(method="draft_model"),
        _get_v2_model_runner_unsupported_features=list,
    )
    assert find_obstacle(config, drafter) is None
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    with pytest.raises(StartFailed, match="drafter is not possible on a GPU"):
        find_obstacle(config, drafter)
    config.use_v2_model_runner = True
    assert find_obstacle(config, drafter) is None


@pytest.fixture
async def created(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """vLLM's configurations with which processes, as on a GPU, have been created.

    The configurations are real: without Triton vLLM chooses Model Runner V1.
    """
    created: list[Any] = []
    monkeypatch.setattr(processes, "_create_llm", created.append)
    monkeypatch.setattr(processes, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    return created


async def launched(speculation: SpeculationSettings) -> tuple[StartSettings, FeatureStatus]:
    """Settings after the start of vLLM's processes, and what the status says of drafts."""
    start_settings = StartSettings(engine=settings(), speculation=speculation)
    features = Features(start_settings)
    started = processes.VllmProcesses(settings(), features, worker_extension=WORKER_EXTENSION)
    try:
        await started.start(MODEL)
    finally:
        await started.stop()
    [status] = features.of(Speculation).status()
    return start_settings, status


async def test_auto_is_off_with_the_reason_where_vllm_chooses_the_first_model_runner(
    created: list[Any],
) -> None:
    found, status = await launched(AUTO)
    [config] = created
    assert found.of(SpeculationSettings).mode == "off" and config.speculative_config is None
    reason = "vLLM uses Model Runner V1 here, as V2 needs Triton"
    assert (status.enabled, status.reason) == (False, reason)


async def test_siblings_do_not_start_where_vllm_chooses_the_first_model_runner(
    created: list[Any],
) -> None:
    with pytest.raises(StartFailed, match="speculation.mode siblings is not possible"):
        await launched(SIBLINGS)
    assert not created


def test_profiles_of_two_cards_differ(monkeypatch: Any) -> None:
    monkeypatch.setattr(register, "_settings", AttentionSettings())
    config = gpu_arguments().create_engine_config()
    keys = []
    for card in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"):
        monkeypatch.setattr(current_platform, "get_device_name", lambda card=card: card)
        keys.append(profile_key(config))
    assert keys[0] != keys[1] and keys[0] | {"device": ""} == keys[1] | {"device": ""}


def test_profile_depends_on_what_changes_the_time_of_a_step(monkeypatch: Any) -> None:
    monkeypatch.setattr(register, "_settings", AttentionSettings())
    config = gpu_arguments().create_engine_config()
    before = profile_key(config)
    for holder, name, value in (
        (config.model_config, "quantization", "fp8"),
        (config.cache_config, "cache_dtype", "fp8"),
        (config.scheduler_config, "async_scheduling", "other"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(holder, name, value)
            assert profile_key(config) != before


class Core:
    """EngineCore as the service calls it; returns the given answers."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.called: list[str] = []

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.called.append(method)
        return self.answers.get(method)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A platform with a GPU, and the lengths of the profiles that are measured on it."""
    profiles: list[int] = []

    async def measure(llm: Any, info: Any, longest: int) -> None:
        profiles.append(longest)

    async def awaited(llm: Any, call: Any) -> Any:
        return await call

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(startup, "measure_step_costs", measure)
    monkeypatch.setattr(startup, "await_engine", awaited)
    return profiles


BASELINE = "coppice_begin_baseline"
START, FINISH = "coppice_start_sibling_drafts", "coppice_finish_sibling_profile"


@pytest.mark.parametrize(
    ("needs_profile", "called"), [(True, [BASELINE, START, FINISH]), (False, [BASELINE, START])]
)
async def test_drafting_starts_in_engine_core_on_a_gpu(
    on_gpu: list[int], needs_profile: bool, called: list[str]
) -> None:
    core = Core(**{START: needs_profile})
    await startup.start_drafting(llm_of(core), SIBLINGS, engine_info())
    assert core.called == called
    assert on_gpu == [SIBLINGS.longest_draft] * needs_profile


def llm_of(core: Core) -> Any:
    return SimpleNamespace(engine_core=core)


def engine_info() -> Any:
    return SimpleNamespace()
