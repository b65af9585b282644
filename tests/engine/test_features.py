"""Features of the engine, with reasons, by settings and by the state of the workers."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from engine.attention import register
from engine.attention.feature import UNSUPPORTED
from engine.attention.settings import AttentionSettings
from engine.feature_base import StartSettings
from engine.features import Features
from engine.kv_transfer.feature import KvSupport, PromptKvExport
from engine.runtime.feature_guard import Feature
from engine.settings import EngineSettings
from engine.speculation import startup
from engine.speculation.settings import SpeculationSettings
from engine.types.feature_stats import AttentionFallbackReason, AttentionState, FeatureStatus
from tests.engine.model_families import save_family
from tests.engine.seedling import MODEL

STEP_REASONS = {"cuda_graphs", "query_length", "nothing_shared", "not_worth_it"}
"""Reasons of single steps, which a process as a whole cannot have."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """Processes of an engine that has started, with the answers to its features."""

    llm: Any
    attention: AttentionState

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        assert method == "coppice_attention_state"
        return [self.attention]

    async def call_cores(self, method: str, *args: Any) -> list[Any]:
        assert method == "coppice_can_keep_kv"
        return [True]


def listed(
    *,
    attention: AttentionState = "on",
    shared_prefix: Any = "auto",
    quantization: str | None = None,
    model: Any = None,
    kv: KvSupport | None = None,
    **settings: Any,
) -> dict[str, FeatureStatus]:
    """Features of an engine that has started, by name."""
    config = SimpleNamespace(
        model_config=model or SimpleNamespace(quantization=quantization),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    engine: Any = Started(llm=SimpleNamespace(vllm_config=config), attention=attention)
    features = Features(
        StartSettings(
            engine=EngineSettings(**settings),
            attention=AttentionSettings(shared_prefix=shared_prefix),
            speculation=SpeculationSettings(mode="siblings"),
        )
    )
    asyncio.run(features.prepare(engine))
    features.of(PromptKvExport).support = kv or KvSupport()
    return {feature.name: feature for feature in features.status()}


def test_every_state_of_attention_has_a_reason() -> None:
    states = {"off", "backend", *get_args(AttentionFallbackReason)} - STEP_REASONS
    assert UNSUPPORTED.keys() == states
    for state in UNSUPPORTED:
        assert not listed(attention=state)["shared_prefix_attention"].enabled


def test_backend_that_is_not_replaced_is_the_reason() -> None:
    found = listed(attention="backend", shared_prefix="always")["shared_prefix_attention"]
    assert found.reason.startswith("backend: ")


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("auto", "used in steps where a measurement shows a gain"),
        ("always", "used in every step with a shared prefix"),
    ],
)
def test_attention_in_use_says_when(mode: str, reason: str) -> None:
    found = listed(shared_prefix=mode)["shared_prefix_attention"]
    assert (found.enabled, found.reason) == (True, reason)


@pytest.mark.parametrize(
    ("device", "eager", "reason"),
    [
        ("cpu", None, "there are no CUDA graphs on CPU"),
        ("cuda", True, "engine.eager is true"),
        ("cuda", None, "graphs.budget_bytes is none: vLLM captures its own sizes"),
    ],
)
def test_graphs_that_are_not_planned_have_a_reason(
    device: str, eager: bool | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: device == "cpu")
    assert listed(eager=eager)["cuda_graph_plan"].reason == reason


def test_settings_enable_features() -> None:
    off = listed()
    assert not any(
        off[name].enabled
        for name in ("lora_adapters", "kv_offloading", "quantization", "expert_parallel")
    )
    on = listed(
        quantization="fp8",
        max_adapters=2,
        kv_offload_bytes=2**30,
        kv_cache_dtype="fp8",
        tool_parser="hermes",
    )
    for name in ("lora_adapters", "kv_offloading", "quantization", "quantized_kv_cache"):
        assert on[name].enabled, name
    reason = "fp8, from the model's config.json: its weights cannot be updated"
    assert on["quantization"].reason == reason
    assert on["tool_parser"].enabled


@pytest.mark.parametrize(
    ("is_set", "is_moe", "num_ranks", "reason"),
    [
        (True, True, 2, None),
        (False, True, 2, "engine.enable_expert_parallel is false"),
        (True, False, 2, "the model has no experts"),
        (True, True, 1, "engine.tensor_parallel_size is 1"),
    ],
)
def test_expert_parallelism_needs_experts_and_several_ranks(
    is_set: bool, is_moe: bool, num_ranks: int, reason: str | None
) -> None:
    model = SimpleNamespace(quantization=None, is_moe=is_moe)
    found = listed(model=model, enable_expert_parallel=is_set, tensor_parallel_size=num_ranks)[
        "expert_parallel"
    ]
    assert found.enabled == (reason is None)
    assert reason is None or found.reason == reason


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("experts"), "mixture_of_experts")


@pytest.mark.parametrize(
    ("method", "config", "of_dense", "of_experts"),
    [
        ("int8_per_channel_weight_only", None, False, True),
        ("experts_int8", None, False, True),
        ("fp8_per_channel", None, True, True),
        ("mxfp8", None, True, True),
        ("online", {"moe": "fp8_per_tensor"}, False, True),
        ("online", {"linear": "fp8_per_tensor"}, True, True),
        ("online", {"targets": {"*": "fp8_per_tensor"}}, True, True),
        (None, None, False, False),
    ],
)
def test_quantization_of_experts_is_off_for_a_model_without_experts(
    experts: Path,
    method: str | None,
    config: dict[str, Any] | None,
    of_dense: bool,
    of_experts: bool,
) -> None:
    for path, is_on in ((MODEL, of_dense), (experts, of_experts)):
        arguments = EngineArgs(str(path), quantization=method, quantization_config=config)
        model = arguments.create_model_config()
        assert model.quantization == method
        found = listed(model=model)["quantization"]
        assert found.enabled == is_on
        assert is_on or method is None or found.reason == f"{method}: the model has no experts"


def test_kv_of_sessions_is_retained_unless_the_fraction_is_zero() -> None:
    found = listed()["session_kv_retention"]
    assert (found.enabled, found.reason) == (True, "up to 50% of the KV cache, for 300 s")
    off = listed(session_kv_fraction=0)["session_kv_retention"]
    assert (off.enabled, off.reason) == (False, "engine.session_kv_fraction is 0")


def test_gpu_that_cannot_copy_into_shared_memory_is_reported() -> None:
    assert listed()["direct_kv_copies"].enabled
    found = listed(kv=KvSupport(indirect_reason="cudaHostRegister failed: 2"))["direct_kv_copies"]
    assert (found.enabled, found.reason) == (False, "cudaHostRegister failed: 2")


def test_prompt_kv_that_stays_on_the_gpu_names_its_readers() -> None:
    assert not listed(kv=KvSupport(gpu_reason="out of memory"))["prompt_kv_on_gpu"].enabled


@pytest.mark.parametrize(
    ("mode", "on_cpu", "built", "ranks", "reason"),
    [
        ("off", True, True, 1, "speculation.mode is off"),
        ("auto", False, True, 1, None),
        ("siblings", True, False, 1, "the draft store is not compiled"),
        ("siblings", True, True, 2, "the rank that drafts does not sample"),
        ("siblings", True, True, 1, None),
        ("drafter", True, False, 1, None),
    ],
)
def test_reason_why_nothing_is_drafted(
    mode: Any, on_cpu: bool, built: bool, ranks: int, reason: str | None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(startup, "is_built", lambda: built)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: on_cpu)
    engine = EngineSettings(pipeline_parallel_size=ranks)
    found = startup.why_off(SpeculationSettings(mode=mode), engine)
    assert (found or "").startswith(reason or "") and (found is None) == (reason is None)


def runner_of(unsupported: list[Any]) -> Any:
    """A model runner with a group of layers per reason why they do not support sharing."""

    def group(reason: Any) -> Any:
        builder = SimpleNamespace(grouper=SimpleNamespace(unsupported=reason))
        return SimpleNamespace(layer_names=["layer"], get_metadata_builder=lambda: builder)

    return SimpleNamespace(attn_groups=[[group(reason) for reason in unsupported]])


@pytest.mark.parametrize(
    ("mode", "prepared", "state"),
    [
        ("off", [], "off"),
        ("always", [], "backend"),
        ("always", ["sinks", None], "on"),
        ("always", ["sinks", "sliding_window"], "sinks"),
    ],
)
def test_state_of_attention_in_a_worker(
    mode: Any, prepared: list[Any], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(register, "_settings", AttentionSettings(shared_prefix=mode))
    assert register.state(runner_of(prepared)) == state


def test_failed_attention_is_not_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Feature("test")
    failed.disable(ValueError("x"))
    monkeypatch.setattr(register, "_settings", AttentionSettings(shared_prefix="auto"))
    monkeypatch.setattr(register, "FEATURE", failed)
    assert register.state(runner_of([None])) == "failed"
