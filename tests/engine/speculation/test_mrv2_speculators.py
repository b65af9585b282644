"""Replacement of the speculators that vLLM's Model Runner V2 creates."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.drafter.worker import draft_speculator
from engine.settings import SpeculationMode, SpeculationSettings
from engine.speculation import gpu_speculator, mrv2_speculators, process_settings


def stock(vllm_config: Any, device: Any, req_states: Any) -> str:
    return "vLLM's"


@pytest.fixture
def spec_decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's module with the factory, restored afterwards."""
    from vllm.v1.worker.gpu import spec_decode

    monkeypatch.setattr(spec_decode, "init_speculator", stock)
    monkeypatch.setattr(draft_speculator, "DraftSpeculator", lambda *_: "draft model")
    monkeypatch.setattr(gpu_speculator, "SiblingSpeculator", lambda *_: "siblings")
    monkeypatch.setattr(process_settings, "_settings", process_settings._settings)
    yield spec_decode


@pytest.mark.parametrize(
    ("mode", "speculator"),
    [
        ("drafter", "draft model"),
        ("siblings", "siblings"),
        ("auto", "siblings"),
        ("off", "vLLM's"),
    ],
)
def test_speculator_is_that_of_the_mode(
    mode: SpeculationMode, speculator: str, spec_decode: Any
) -> None:
    process_settings.install(SpeculationSettings(mode=mode))
    mrv2_speculators.install()
    assert spec_decode.init_speculator(None, "cuda", None) == speculator


def test_model_runner_that_is_already_imported_is_changed_too(
    spec_decode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = SimpleNamespace(init_speculator=stock)
    monkeypatch.setitem(sys.modules, mrv2_speculators.MODEL_RUNNER, runner)
    process_settings.install(SpeculationSettings(mode="drafter"))
    for _ in range(2):
        mrv2_speculators.install()
    assert runner.init_speculator is spec_decode.init_speculator
    assert runner.init_speculator.__wrapped__ is stock


def test_model_runner_takes_the_factory_from_this_module() -> None:
    """The name is imported, so replacing it before or after the import has an effect."""
    from importlib.util import find_spec
    from pathlib import Path

    found = find_spec(mrv2_speculators.MODEL_RUNNER)
    assert found is not None and found.origin is not None
    text = Path(found.origin).read_text()
    assert "from vllm.v1.worker.gpu.spec_decode import init_speculator" in text
    assert "init_speculator(\n" in text
