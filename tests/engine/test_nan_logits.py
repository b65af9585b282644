"""NaN logits: the sample fails, and every other one is served."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.patches import nan_logits
from engine.vllm_engine import VllmEngine
from tests.engine.seedling import BLOCK, MODEL, reference, settings, teacher_forced
from tests.serving import Served, serving

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

NAN_TOKEN = 0
"""The padding, which the model does not sample."""
PROMPT = [5, 7, 11, 13, 17, 19]
FAILING = [5, 7, NAN_TOKEN, 13]
NUM_BLOCKS = 24
VOCAB = 269


def untied(folder: Path, **changed: torch.Tensor) -> Path:
    """The bundled model with a head of its own, so that an embedding may be NaN."""
    shutil.copytree(MODEL, folder)
    config = json.loads((MODEL / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(MODEL / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights | changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_nan(folder: Path) -> Path:
    embedding = load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"]
    embedding[NAN_TOKEN] = torch.nan
    return untied(folder, **{"model.embed_tokens.weight": embedding})


async def sample(
    served: Served, *prompts: Sequence[int], max_tokens: int = 4, **fields: Any
) -> Any:
    content = {
        "groups": [{"prompt": {"token_ids": list(p)}, "n": 2, "seed": 3} for p in prompts],
        "sampling": {"max_tokens": max_tokens, "ignore_eos": True},
    }
    answer = await served.http.post("/v1/rollouts", json=content | fields)
    assert answer.status_code == 200, answer.text
    return [group["samples"] for group in answer.json()["groups"]]


async def assert_served(served: Served, prompt: Sequence[int], model: Any) -> None:
    [samples] = await sample(served, prompt)
    for each in samples:
        assert each["finish_reason"] == "length"
        forced = teacher_forced(model, list(prompt), each["token_ids"])
        assert each["logprobs"] == pytest.approx(forced, abs=1e-4)


async def test_sample_with_nan_fails_and_all_others_are_served(tmp_path: Path) -> None:
    """Also those that receive the blocks of a failed one, of which they fill only a part."""
    good, model = untied(tmp_path / "good"), reference()
    small = settings(
        with_nan(tmp_path / "nan"), cache_bytes=NUM_BLOCKS * 2**17, max_context_tokens=512
    )
    engine = VllmEngine(small)
    async with serving(engine, tmp_path) as served:
        assert engine.info.num_blocks <= NUM_BLOCKS
        served_samples, failed = await sample(served, PROMPT, FAILING, max_tokens=200)
        assert [each["finish_reason"] for each in served_samples] == ["length"] * 2
        assert [len(each["logprobs"]) for each in served_samples] == [200] * 2
        for each in failed:
            assert (each["finish_reason"], each["token_ids"], each["logprobs"]) == ("error", [], [])
        for length in range(1, NUM_BLOCKS + 1):
            await assert_served(served, range(length, length + BLOCK + length % 5 + 1), model)

        item = {"prompt": {"token_ids": FAILING}, "responses": [[3, 4]]}
        for fields in ({}, {"top_logprobs": 2}):
            scored = await served.http.post("/v1/score", json={"items": [item], **fields})
            assert (scored.status_code, scored.json()["code"]) == (422, "invalid_request")
            assert "the logits of these tokens are NaN with the weights v0" in scored.text

        await engine.pause("keep")
        await engine.update_weights(good, "v1")
        await engine.resume()
        await assert_served(served, FAILING, model)


# Steps, without an engine.


def step(logprobs: Any, sampled: list[list[int]], starts: list[int] | None = None) -> Any:
    """vLLM's output of a step; the requests are named by their rows."""
    from vllm.v1.outputs import LogprobsLists

    values = np.array(logprobs, np.float32)[:, None]
    return SimpleNamespace(
        logprobs=LogprobsLists(np.zeros(values.shape), values, np.zeros(len(values)), starts),
        req_id_to_index={str(row): row for row in range(len(sampled))},
        sampled_token_ids=sampled,
    )


def test_requests_with_nan_are_found_by_their_sampled_tokens() -> None:
    nan = np.nan
    assert nan_logits.requests_with_nan(SimpleNamespace(logprobs=None)) == set()
    assert nan_logits.requests_with_nan(step([-1, -2], [[3], [4]])) == set()
    assert nan_logits.requests_with_nan(step([-1, nan, -3], [[3], [4], [5]])) == {"1"}
    assert nan_logits.requests_with_nan(step([-1, nan], [[3], []])) == set()  # a part of a prompt
    drafts = step([-1, nan, nan, -1, -1], [[3], [4, 5], [7]], [0, 2, 4])
    assert nan_logits.requests_with_nan(drafts) == {"1"}  # the draft of request 0 was rejected


def test_new_blocks_are_zeroed_from_the_first_nan_on() -> None:
    update = nan_logits.ending_nan_samples(lambda self, *_: set(self.grammar_compile_error_reqs))
    block_ids = nan_logits.zeroing_after_nan(lambda _: [3, 4], lambda needs_zeroing: needs_zeroing)
    scheduler = SimpleNamespace(kv_cache_config=False, grammar_compile_error_reqs=set())
    assert update(scheduler, None, step([-1], [[3]])) == set()
    assert block_ids(scheduler) is None
    assert update(scheduler, None, step([np.nan], [[3]])) == {"0"}
    assert block_ids(scheduler) == [3, 4]
    assert block_ids(SimpleNamespace(kv_cache_config=True)) == [3, 4]


def test_ids_beyond_the_vocabulary_are_clamped_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of vLLM's sampling kernels, in the methods of its Model Runner V2."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.sample import sampler as samplers
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler as rejection

    for owner, name in (
        (Scheduler, "update_from_output"),
        (Scheduler, "_get_new_block_ids_to_zero"),
        (KVCacheConfig, "needs_kv_cache_zeroing"),
        (samplers.Sampler, "sample"),
        (rejection.RejectionSampler, "_verify"),
    ):
        monkeypatch.setattr(owner, name, owner.__dict__[name])
    nan_logits.install_on_gpu.__wrapped__()
    beyond = torch.tensor([3, VOCAB + 700, VOCAB - 1])
    monkeypatch.setattr(samplers, "gumbel_sample", lambda *_, **__: beyond.clone())
    monkeypatch.setattr(samplers, "apply_top_k_top_p", lambda logits, *_: logits)
    monkeypatch.setattr(
        rejection, "rejection_sample", lambda *_, **__: (beyond[:, None].clone(), torch.ones(3))
    )
    states = SimpleNamespace(
        get_top_k_top_p=lambda *_: (None, None),
        temperature=SimpleNamespace(gpu=None),
        seeds=SimpleNamespace(gpu=None),
    )
    sampler = object.__new__(samplers.Sampler)
    sampler.apply_sampling_params = lambda logits, *_, **__: logits
    sampler.sampling_states, sampler.use_fp64_gumbel = states, False
    sampler.use_flashinfer = sampler.use_xpu_sampler = False
    logits = torch.full((3, VOCAB), torch.nan)
    tokens, _ = sampler.sample(logits, *[None] * 7)
    assert tokens.tolist() == [3, VOCAB - 1, VOCAB - 1]

    verifier = object.__new__(rejection.RejectionSampler)
    verifier.sampler, verifier.watermark_key = sampler, None
    verifier.num_speculative_steps = 0
    verifier.synthetic_conditional_rates, verifier.use_block_verification = None, False
    _, tokens, _ = verifier._verify(logits, *[None] * 10)
    assert tokens.tolist() == [[3], [VOCAB - 1], [VOCAB - 1]]
