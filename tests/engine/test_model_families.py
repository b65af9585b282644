"""Model families on the real engine: exact logprobs, weights updates, and what each supports.

docs/reference/model-features.md is the table of these results.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.train import (
    PromptKV,
    TrainingGroup,
    compute_prompt_kv,
    grouped_backward,
)
from engine.attention.settings import AttentionSettings
from engine.speculation.counters import COUNTERS
from engine.types.feature_stats import FeatureStatus, SharedPrefixStats
from engine.types.kv import ExportSlot, KvFormat, LayerFormat
from engine.types.samples import SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from service.kv.handles.file_layout import LayoutFactory
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import COMMITTED, EXPORTING
from tests.engine.model_families import save_family
from tests.engine.seedling import reference, settings, teacher_forced
from tests.engine.speculation.drafting_engine import drafting_engine, in_group
from tests.engine.stepped_engine import LiveEngine, live_engine
from tests.train.models import error, gradients, random_group, random_loss
from tests.train.naive import naive_backward

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore"),
]
LONG_PROMPT = [5 + i * i % 211 for i in range(400)]
PROMPT = [5 + i * 7 % 200 for i in range(100)]  # longer than the sliding windows
TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.1
QUANTIZED_TOLERANCE = 0.4  # logprobs differ by about 3 between the two sets of weights
SERVED = (
    "mixture_of_experts",
    "sliding_window",
    "alternating_windows",
    "heads_of_several_sizes",
)


def largest_error(engine: LiveEngine, model: Path) -> float:
    """Largest difference of a sample's logprobs from those of transformers."""
    (answer,) = engine.ask(PROMPT, max_tokens=16, temperature=1.0)
    expected = teacher_forced(reference(model), PROMPT, answer.token_ids)
    return max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True))


@pytest.mark.parametrize("family", SERVED)
def test_logprobs_are_exact_before_and_after_a_weights_update(family: str, tmp_path: Path) -> None:
    first = save_family(tmp_path / "v1", family)
    second = save_family(tmp_path / "v2", family, seed=6)
    with live_engine(first) as engine:
        assert largest_error(engine, first) < TOLERANCE
        engine.swap(second)
        assert largest_error(engine, second) < TOLERANCE


def prepared_format(engine: LiveEngine) -> KvFormat:
    (answer,) = engine.rpc("coppice_prepare_kv_export")
    assert isinstance(answer, dict), answer
    layers = [LayerFormat(**layer) for layer in answer.pop("layers")]
    fields = {name: answer[name] for name in ("dtype", "not_movable")}
    return KvFormat.of_layers(layers, rope={}, **fields)


def exported_kv(arena: TestArena, slot: ExportSlot) -> PromptKV:
    """The prompt KV of a slot, as a trainer receives it."""
    file = LayoutFactory("model", arena.form).of([0] * slot.num_tokens, "v1")
    data = torch.from_numpy(arena.data(slot))
    dtype = getattr(torch, arena.form.dtype)
    return PromptKV.of_named(
        {
            tensor.name: data[tensor.start : tensor.end].view(dtype).view(tensor.shape)
            for tensor in file.tensors()
        }
    )


def export_prompts(
    model: Path, tmp_path: Path, num_tokens: Sequence[int], *, can_reuse: bool, **settings: Any
) -> list[PromptKV]:
    """Exports the starts of LONG_PROMPT, one after the other, so that later ones find a prefix.

    `can_reuse` is whether `kv_reuse` can move the keys of the model.
    """
    with live_engine(model, **(EXPORTING | settings)) as engine:
        kv_format = prepared_format(engine)
        assert (kv_format.not_movable is None) == can_reuse
        arena = TestArena(tmp_path / "arena", kv_format)
        found = []
        for number in num_tokens:
            slot = arena.slot(number - 1)
            engine.finish(engine.submit(LONG_PROMPT[:number], export=slot, max_tokens=40))
            engine.rpc("coppice_flush_exports")
            assert arena.words(slot) == COMMITTED
            found.append(exported_kv(arena, slot))
        arena.check()
    return found


def assert_exact_gradient(model: Path, prompt_kv: PromptKV, num_tokens: int) -> None:
    """The gradient with the server's prompt KV equals that of padded rows."""
    policy = reference(model)
    group = random_group((30, 1, 80), prompt_tokens=num_tokens)
    group = replace(group, prompt=torch.tensor(LONG_PROMPT[:num_tokens]))
    naive_backward(policy, group, random_loss(group))
    exact = gradients(policy)
    report = grouped_backward(policy, group, random_loss(group), prompt_kv=prompt_kv)
    assert report.prompt_kv_error is not None and report.prompt_kv_error < TOLERANCE
    assert error(gradients(policy), exact) < TOLERANCE


EXPORTED_TOKENS = (40, 100, 224, 300)
"""Below the window of 64 tokens, above it, at a block's border, and with a cached prefix."""


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixture_of_experts", {}),
        ("sliding_window", {}),
        ("alternating_windows", {}),
        ("alternating_windows", {"disable_hybrid_kv_cache_manager": True}),
        ("heads_of_several_sizes", {}),
        ("heads_of_several_sizes", {"disable_hybrid_kv_cache_manager": True}),
    ],
)
def test_prompt_kv_has_the_exact_gradient(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = save_family(tmp_path / "model", family)
    can_reuse = family == "mixture_of_experts"
    found = export_prompts(model, tmp_path, EXPORTED_TOKENS, can_reuse=can_reuse, **settings)
    for prompt_kv, num_tokens in zip(found, EXPORTED_TOKENS, strict=True):
        assert_exact_gradient(model, prompt_kv, num_tokens)
    if family == "alternating_windows":
        stored = [keys.shape[1] for keys in found[-1].keys]
        # The window of token 299 begins at token 236, unless vLLM keeps all tokens.
        assert stored == [299 if settings else 299 - 224, 299]


def test_prompt_kv_of_attention_sinks_is_that_of_transformers(tmp_path: Path) -> None:
    model = save_family(tmp_path / "model", "attention_sinks")
    (found,) = export_prompts(model, tmp_path, (300,), can_reuse=False, dtype="bfloat16")
    group = TrainingGroup(prompt=torch.tensor(LONG_PROMPT[:300]), responses=(torch.tensor([1]),))
    truth = compute_prompt_kv(reference(model), group)
    for ours, expected in zip(
        (*found.keys, *found.values), (*truth.keys, *truth.values), strict=True
    ):
        difference = (ours.float() - expected[:, -ours.shape[1] :]).norm(dim=(0, 2))
        # Rounding in bfloat16 sends a few tokens to other experts.
        assert float(difference.median() / expected.norm(dim=(0, 2)).median()) < 0.02


def test_weights_update_that_vllm_cannot_load_is_refused_and_undone(tmp_path: Path) -> None:
    """vLLM's loader of gpt-oss bypasses the weight loaders of its experts."""
    first = save_family(tmp_path / "v1", "attention_sinks")
    second = save_family(tmp_path / "v2", "attention_sinks", seed=6)
    with live_engine(first, dtype="bfloat16") as engine:
        before = largest_error(engine, first)
        with engine.paused():
            (answer,) = engine.load(second)
        after = largest_error(engine, first)
    assert (answer["ok"], answer["restored"]) == (False, True)
    assert "vLLM cannot load new weights into model.layers.0" in answer["error"]
    assert max(before, after) < BFLOAT16_TOLERANCE


def test_model_with_a_quantized_kv_cache_is_served_and_updated(tmp_path: Path) -> None:
    first = save_family(tmp_path / "v1", "dense")
    second = save_family(tmp_path / "v2", "dense", seed=6)
    with live_engine(first, dtype="bfloat16", kv_cache_dtype="fp8") as engine:
        assert largest_error(engine, first) < QUANTIZED_TOLERANCE
        engine.swap(second)
        assert largest_error(engine, second) < QUANTIZED_TOLERANCE


def test_gated_delta_net_is_served_and_updated_without_prompt_kv(tmp_path: Path) -> None:
    """vLLM's CPU kernels of the family need bfloat16."""
    first = save_family(tmp_path / "v1", "gated_delta_net")
    second = save_family(tmp_path / "v2", "gated_delta_net", seed=6)
    with live_engine(first, dtype="bfloat16", **EXPORTING) as engine:
        (reason,) = engine.rpc("coppice_prepare_kv_export")
        assert reason == "UnsupportedCache: model.layers.0.linear_attn has a MambaSpec"
        assert largest_error(engine, first) < BFLOAT16_TOLERANCE
        engine.swap(second)
        assert largest_error(engine, second) < BFLOAT16_TOLERANCE


@pytest.mark.parametrize("family", SERVED)
def test_drafts_from_siblings_change_no_sample(family: str, tmp_path: Path) -> None:
    """Greedy samples of one group are drafted from the first one."""
    model = save_family(tmp_path / "model", family)
    with drafting_engine(model, tmp_path / "store") as (engine, _):
        prompts = [PROMPT] * 3
        (alone,) = engine.ask(PROMPT, max_tokens=40, **in_group("a"))
        before = sum(COUNTERS.read()["accepted"].values())
        drafted = engine.ask(*prompts, max_tokens=40, **in_group("a"))
        assert sum(COUNTERS.read()["accepted"].values()) > before
    expected = teacher_forced(reference(model), PROMPT, alone.token_ids)
    for answer in (alone, *drafted):
        assert answer.token_ids == alone.token_ids
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


SHORT_PROMPT = PROMPT[:40]
"""A shared block and a response of 8 tokens fit into the window."""


@pytest.mark.parametrize(
    ("family", "prompt", "skipped"),
    [
        ("mixture_of_experts", PROMPT, False),
        ("sliding_window", SHORT_PROMPT, False),
        ("sliding_window", PROMPT, True),
        ("alternating_windows", SHORT_PROMPT, False),
        ("alternating_windows", PROMPT, True),
        ("heads_of_several_sizes", PROMPT, True),
    ],
)
async def test_shared_prefix_attention_is_exact_in_the_layers_that_use_it(
    family: str, prompt: list[int], skipped: bool, tmp_path: Path
) -> None:
    """Layers with all tokens use it in every step, the others while rows fit into the window."""
    model = save_family(tmp_path / "model", family)
    feature, stats, error = await sampled_with_shared_prefixes(model, prompt)
    assert (feature.enabled, feature.reason) == (True, "used in every step with a shared prefix")
    assert (stats.steps_grouped > 0) == (family != "sliding_window" or not skipped)
    assert (stats.steps_skipped["sliding_window"] > 0) == skipped
    assert error < TOLERANCE


async def test_shared_prefix_attention_adds_sinks(tmp_path: Path) -> None:
    model = save_family(tmp_path / "model", "attention_sinks")
    feature, stats, error = await sampled_with_shared_prefixes(model, PROMPT, dtype="bfloat16")
    if "processor" in feature.reason:
        pytest.skip("vLLM packs the cache in bfloat16 for other instructions")
    assert feature.enabled and stats.steps_grouped > 0
    assert stats.steps_skipped["sliding_window"] > 0
    assert error < BFLOAT16_TOLERANCE


async def sampled_with_shared_prefixes(
    model: Path, prompt: list[int], **options: Any
) -> tuple[FeatureStatus, SharedPrefixStats, float]:
    """The feature, its counters and the largest error of logprobs after four samples."""
    engine = VllmEngine(
        settings(model, max_context_tokens=256, prompt_kv=False, **options),
        attention=AttentionSettings(shared_prefix="always"),
    )
    try:
        await engine.start("v0")
        features = {feature.name: feature for feature in engine.info.features}
        sampling = Sampling(max_tokens=8, ignore_eos=True)
        submitted = await engine.submit(
            [SampleRequest(id=f"{i}", prompt_token_ids=prompt, sampling=sampling) for i in range(4)]
        )
        completions = await asyncio.gather(*submitted)
        await asyncio.sleep(1.5)  # counters are read once per second
        stats = engine.stats(SharedPrefixStats)
    finally:
        await engine.stop()
    errors = [
        abs(found - expected)
        for done in completions
        for found, expected in zip(
            done.logprobs,
            teacher_forced(reference(model), prompt, list(done.token_ids)),
            strict=True,
        )
    ]
    return features["shared_prefix_attention"], stats, max(errors)
