"""vLLM's config for speculation, resolution of `auto`, and the profile cache."""

from pathlib import Path

import pytest

from engine.launch.arguments import engine_arguments
from engine.settings import SpeculationSettings
from engine.speculation.cost import Profile, ProfileCache, Step, profile_batches
from engine.speculation.startup import resolve_mode
from kernels.draft_index.store import is_built
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
