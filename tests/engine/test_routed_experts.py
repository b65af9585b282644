"""Routed experts of the real engine, replayed by the trainer."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from coppice.train import TrainingGroup
from engine.errors import StartFailed
from engine.settings import EngineSettings
from engine.types.samples import Completion, SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from tests.engine.made_arguments import engine_arguments
from tests.engine.model_families import save_family
from tests.train.naive import naive_logprobs

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]
PROMPT = [5 + i % 90 for i in range(75)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_family(folder / f"{seed}", "mixture_of_experts", seed=seed) for seed in (5, 6)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(models: list[Path]) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(
        EngineSettings(
            model=str(models[0]),
            dtype="float32",
            max_context_tokens=512,
            max_sequences=16,
            max_batched_tokens=32,
            return_routed_experts=True,
        )
    )
    await engine.start("v0")
    yield engine
    await engine.stop()


async def sample(engine: VllmEngine, *first_positions: int | None) -> list[Completion]:
    requests = [
        SampleRequest(
            id=uuid.uuid4().hex,
            prompt_token_ids=PROMPT,
            sampling=Sampling(max_tokens=20, ignore_eos=True),
            experts_from=first,
            seed=7,
        )
        for first in first_positions
    ]
    return list(await asyncio.gather(*await engine.submit(requests)))


def logprobs_of(model: Any, completion: Completion, *, replayed: bool) -> torch.Tensor:
    rows = torch.from_numpy(completion.routed_experts.astype(np.int16))  # type: ignore[union-attr]
    group = TrainingGroup(
        prompt=torch.tensor(PROMPT),
        responses=(torch.tensor(completion.token_ids),),
        routed_experts=(rows,) if replayed else None,
    )
    with torch.no_grad():
        return naive_logprobs(model, group).logprobs


def experts_of(path: Path, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Experts that the model in Transformers selects by itself, in ascending order."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: seen.append(out[2]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return np.sort(torch.stack(seen, 1).numpy(), -1)


async def test_experts_equal_those_of_the_model(engine: VllmEngine, models: list[Path]) -> None:
    """In chunked prefills, for cached prefixes and beside samples that return none."""
    both = [*await sample(engine, 0, None, 74), *await sample(engine, 0)]
    assert both[1].routed_experts is None and both[3].num_cached_tokens == 64
    for completion, first in zip(both, (0, None, 74, 0), strict=True):
        if first is not None:
            assert completion.routed_experts is not None
            assert completion.routed_experts.dtype == np.uint8
            wanted = experts_of(models[0], [*PROMPT, *completion.token_ids[:-1]])[first:]
            np.testing.assert_array_equal(np.sort(completion.routed_experts, -1), wanted)


async def test_replay_keeps_the_logprobs_of_a_perturbed_router_close(
    engine: VllmEngine, models: list[Path]
) -> None:
    [completion] = await sample(engine, 0)
    engine_logprobs = torch.tensor(completion.logprobs)
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    exact = logprobs_of(model, completion, replayed=True)
    torch.testing.assert_close(exact, engine_logprobs, atol=1e-4, rtol=1e-4)
    torch.manual_seed(1)
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight.data
        weight += 0.2 * weight.std() * torch.randn_like(weight)
    replayed = (logprobs_of(model, completion, replayed=True) - engine_logprobs).abs().max()
    free = (logprobs_of(model, completion, replayed=False) - engine_logprobs).abs().max()
    assert replayed < 0.3 and 2 * replayed < free


async def test_experts_of_cached_prompts_follow_a_weights_update(
    engine: VllmEngine, models: list[Path]
) -> None:
    await sample(engine, 0)
    await engine.pause("keep")
    await engine.update_weights(models[1], "v1")
    await engine.resume()
    [first] = await sample(engine, 0)
    [second] = await sample(engine, 0)
    assert second.num_cached_tokens == 64
    for completion in (first, second):
        assert completion.routed_experts is not None
        wanted = experts_of(models[1], [*PROMPT, *completion.token_ids[:-1]])
        np.testing.assert_array_equal(np.sort(completion.routed_experts, -1), wanted)


async def test_offloaded_kv_is_refused(models: list[Path]) -> None:
    settings = EngineSettings(
        model=str(models[0]), return_routed_experts=True, kv_offload_bytes=2**30
    )
    with pytest.raises(StartFailed, match="exclude each other"):
        engine_arguments(settings, models[0], on_cpu=False)
