"""Replacement of the speculators that vLLM's Model Runner V2 creates."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.drafter.feature import register_speculator
from engine.drafter.worker import draft_speculator
from engine.speculation import settings as process_settings
from engine.speculation.settings import SpeculationMode, SpeculationSettings
from engine.speculation.worker import gpu_speculator, speculator_factory


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
    register_speculator()
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
    speculator_factory.install()
    assert spec_decode.init_speculator(None, "cuda", None) == speculator


def test_model_runner_that_is_already_imported_is_changed_too(
    spec_decode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = SimpleNamespace(init_speculator=stock)
    monkeypatch.setitem(sys.modules, speculator_factory.MODEL_RUNNER, runner)
    process_settings.install(SpeculationSettings(mode="drafter"))
    for _ in range(2):
        speculator_factory.install()
    assert runner.init_speculator is spec_decode.init_speculator
    assert runner.init_speculator.__wrapped__ is stock


def runner_source() -> str:
    from importlib.util import find_spec

    found = find_spec(speculator_factory.MODEL_RUNNER)
    assert found is not None and found.origin is not None
    return Path(found.origin).read_text()


def test_model_runner_takes_the_factory_from_this_module() -> None:
    """The name is imported, so replacing it before or after the import has an effect."""
    text = runner_source()
    assert "from vllm.v1.worker.gpu.spec_decode import init_speculator" in text
    assert "init_speculator(\n" in text


UNUSED = {"prepare_watermarking", "draft_token_confidence_probs"}
"""Attributes that vLLM reads only with a watermark or adaptive verification, which are not set."""


def read_attributes(node: ast.AST) -> Iterator[str]:
    """Attributes of its speculator that the model runner reads, unless it has a draft model."""
    if isinstance(node, ast.If) and "DraftModelSpeculator" in ast.unparse(node.test):
        for other in node.orelse:
            yield from read_attributes(other)
        return
    match node:
        case ast.Attribute(value=owner, attr=name, ctx=ast.Load()):
            if ast.unparse(owner) in ("self.speculator", "speculator"):
                yield name
    for child in ast.iter_child_nodes(node):
        yield from read_attributes(child)


def test_speculator_has_all_attributes_that_the_model_runner_reads() -> None:
    """It has no initial state from vLLM's base class."""
    import torch

    [runner] = [
        node
        for node in ast.parse(runner_source()).body
        if isinstance(node, ast.ClassDef) and node.name == "GPUModelRunner"
    ]
    methods = [each for each in runner.body if getattr(each, "name", "") != "get_draft_model"]
    read = {name for method in methods for name in read_attributes(method)}
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
    )
    made = gpu_speculator.SiblingSpeculator(config, torch.device("cpu"), None)
    assert {"propose", "num_query_per_req", "draft_logits"} < read
    assert {name for name in read if not hasattr(made, name)} == UNUSED
