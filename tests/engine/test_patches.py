"""Each patch of a defect fixes it, and the defect is reproduced without it."""

import importlib.util
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.launch.plugin import install_patches
from engine.patches import cpu_sampling_expansion
from tests.engine.random_models import random_tensors, write_model
from tests.engine.stepped_engine import LiveEngine, live_engine
from tests.engine.upstream_defects import (
    REPEATING,
    SPECULATION,
    TEMPERATURE,
    draw_with_drafts,
    draw_with_seed,
)

ROOT = Path(__file__).parents[2]

# Imports of vLLM and its draft methods emit unrelated warnings.
vllm_warns = pytest.mark.filterwarnings("ignore")


def upstream(name: str) -> ModuleType:
    """A copy of a vLLM module as it is on disk."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expanded(kernel: Callable[..., None], values: torch.Tensor, *replace: float) -> torch.Tensor:
    """The kernel's output for three requests with two, zero and three tokens."""
    output = torch.full((5,), -9, dtype=values.dtype)
    kernel(output, values, torch.tensor([2, 2, 5], dtype=torch.int32), *replace, 128)
    return output


TEMPERATURES = torch.tensor([0.0, 0.5, 0.7])
TOP_K = torch.tensor([7, 8, 9], dtype=torch.int32)


def test_expand_writes_every_value_to_its_tokens() -> None:
    assert torch.equal(
        expanded(cpu_sampling_expansion.expand, TEMPERATURES, 0, 1),
        torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7]),
    )
    assert torch.equal(
        expanded(cpu_sampling_expansion.expand, TOP_K, 0, 0),
        torch.tensor([7, 7, 9, 9, 9], dtype=torch.int32),
    )


@pytest.mark.engine
@vllm_warns
def test_upstream_expand_writes_nothing() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # kernels of this machine: there is one library per ISA

    original = upstream("vllm.utils.cpu_triton_utils")._expand_kernel_impl
    for values in (TEMPERATURES, TOP_K):
        assert (expanded(original, values, 0, 1) == -9).all()


AMX_PERMISSION = """
import ctypes
from engine.patches import cpu_amx_permission

def has_permission():
    mask = ctypes.c_ulong()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask)) == 0  # ARCH_GET_XCOMP_PERM
    return bool(mask.value >> 18 & 1)

before = has_permission()
cpu_amx_permission.install()
print(before, has_permission())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is an extension of x86-64")
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="the processor has no AMX")
def test_process_may_use_amx_only_with_the_patch() -> None:
    command = [sys.executable, "-c", AMX_PERMISSION]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout == "False True\n"


@pytest.mark.engine
@vllm_warns
def test_process_gets_the_patches_it_needs() -> None:
    of_models = (
        "expand_kernel",
        "amx_permission",
        "chunked_seed",
        "adapter_rows",
        "moe_reload",
        "nan_logits",
        "int8_kernel",
        "prompt_token_ids",
        "routed_experts",
    )
    assert install_patches("VllmWorker-1") == of_models
    for name in ("EngineCore", "EngineCore_DP0"):
        assert set(install_patches(name)) == {*of_models, "held_outputs", "same_blocks"}
    assert install_patches("MainProcess") == ("expand_kernel",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = random_tensors(7, tied=False, sharpness=4.0)
    return write_model(tmp_path_factory.mktemp("models") / "sharp", tensors, tied=False)


@pytest.fixture(scope="module")
def unpatched(model: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine.upstream_defects", str(model)]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=600)
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LiveEngine]:
    with live_engine(model, **SPECULATION) as engine:
        yield engine


def surprise(model: Path, responses: list[list[int]]) -> float:
    """z-score of the tokens' mean surprisal.

    Its expectation is the entropy, under an independent implementation of the model.
    """
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    excess, variance = 0.0, 0.0
    for prompt, response in zip(REPEATING, responses, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / TEMPERATURE).log_softmax(-1)
        probs = logprobs.exp()
        entropies = -(probs * logprobs).sum(-1)
        surprises = -logprobs[torch.arange(len(response)), torch.tensor(response)]
        excess += float((surprises - entropies).sum())
        variance += float(((probs * logprobs**2).sum(-1) - entropies**2).sum())
    return excess / math.sqrt(variance)


@pytest.mark.engine
@vllm_warns
def test_drafted_samples_follow_the_model(engine: LiveEngine, model: Path) -> None:
    responses = [answer.token_ids for answer in draw_with_drafts(engine)]
    assert abs(surprise(model, responses)) < 4


@pytest.mark.exhaustive
@pytest.mark.engine
@vllm_warns
def test_drafted_samples_do_not_without_the_patch(unpatched: dict[str, Any], model: Path) -> None:
    assert abs(surprise(model, unpatched["drafted"])) > 8


@pytest.mark.engine
@vllm_warns
def test_seed_gives_the_same_tokens_for_every_chunking(engine: LiveEngine) -> None:
    alone, cached = draw_with_seed(engine), draw_with_seed(engine)
    with engine.paused():
        engine.core.coppice_reset_prefix_cache()
    neighbour = engine.submit(range(200, 241), max_tokens=12, temperature=1.0)
    beside = draw_with_seed(engine)
    engine.finish(neighbour)
    assert [a.num_cached_tokens for a in (alone, cached, beside)] == [0, 128, 0]
    assert alone.token_ids == cached.token_ids == beside.token_ids


@pytest.mark.exhaustive
@pytest.mark.engine
@vllm_warns
def test_seeded_chunked_prompt_ends_the_engine_without_the_patch(
    unpatched: dict[str, Any],
) -> None:
    assert "offset" in unpatched["seeded"]
