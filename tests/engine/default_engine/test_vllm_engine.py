"""The real engine: prefill cost of a group, accuracy of logprobs, and ends of samples."""

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from engine.errors import CheckpointRefused, RequestRefused
from engine.types.chat import ChatRequest
from engine.types.feature_stats import CudaGraphStats
from engine.types.samples import Completion, SampleRequest, Sampling, TopLogprobs
from engine.vllm_engine import VllmEngine
from tests.engine.seedling import BLOCK, MODEL, reference, settings, teacher_forced

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

_COUNT = iter(range(10**9))


async def run(
    engine: VllmEngine,
    prompt: list[int],
    *,
    n: int = 1,
    seed: int | None = None,
    **sampling: object,
) -> list[Completion]:
    chosen: dict[str, Any] = {"max_tokens": 8, **sampling}
    wanted = Sampling(**chosen)
    samples = [
        SampleRequest(
            id=f"t{next(_COUNT)}",
            prompt_token_ids=prompt,
            sampling=wanted,
            seed=None if seed is None else seed + i,
        )
        for i in range(n)
    ]
    return list(await asyncio.gather(*await engine.submit(samples)))


def prompt_of(length: int, *, first: int) -> list[int]:
    """Prompts with different first tokens share no block."""
    return [first + 10, *(10 + i % 60 for i in range(length - 1))]


def computed_prompt_tokens() -> float:
    """Number of prefilled prompt tokens, from vLLM's own counter."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    for sample in samples:
        name, labels = sample.name, sample.labels
        if (name, labels.get("source")) == ("vllm:prompt_tokens_by_source_total", "local_compute"):
            return sample.value
    raise AssertionError("vLLM no longer counts prompt tokens by source")


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 7])
async def test_group_prefills_its_prompt_once_and_each_sibling_its_tail(
    engine: VllmEngine, length: int
) -> None:
    before = computed_prompt_tokens()
    await run(engine, prompt_of(length, first=length % 50), n=8)
    tail = length - BLOCK * ((length - 1) // BLOCK)
    assert computed_prompt_tokens() - before == length + 7 * tail


@pytest.mark.parametrize(
    "distribution",
    [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}],
    ids=["plain", "truncated"],
)
async def test_logprobs_are_those_of_the_sampling_distribution(
    engine: VllmEngine, distribution: dict[str, Any]
) -> None:
    prompt = engine.encode_text("12*34+5")
    samples = await run(engine, prompt, n=8, max_tokens=64, **distribution)
    model = reference()
    for sample in samples:
        assert len(sample.logprobs) == len(sample.token_ids) > 0
        wanted = teacher_forced(model, prompt, sample.token_ids, **distribution)
        worst = max(abs(a - b) for a, b in zip(sample.logprobs, wanted, strict=True))
        assert worst < 1e-3


async def test_greedy_logprobs_equal_those_of_the_model(engine: VllmEngine) -> None:
    prompt = prompt_of(5, first=1)
    (sample,) = await run(engine, prompt, temperature=0.0, top_p=0.1)
    wanted = teacher_forced(reference(), prompt, sample.token_ids)
    worst = max(abs(a - b) for a, b in zip(sample.logprobs, wanted, strict=True))
    assert worst < 1e-3


async def test_score_equals_the_logprobs_of_the_model(engine: VllmEngine) -> None:
    prompt, response = engine.encode_text("Compute 12+34.\n"), engine.encode_text("answer: 46")
    scored = await engine.score(prompt, response)
    wanted = teacher_forced(reference(), prompt, response)
    assert len(scored) == len(response)
    assert max(abs(a - b) for a, b in zip(scored, wanted, strict=True)) < 1e-3


async def test_plain_samples_score_as_they_were_sampled(engine: VllmEngine) -> None:
    prompt = prompt_of(70, first=6)
    (sample,) = await run(engine, prompt, max_tokens=40, ignore_eos=True)
    scored = await engine.score(prompt, sample.token_ids)
    worst = max(abs(a - b) for a, b in zip(scored, sample.logprobs, strict=True))
    assert worst < 1e-3


def assert_top_logprobs(
    places: Sequence[TopLogprobs], tokens: list[int], before: int, num_top_logprobs: int
) -> None:
    """Compares top-k logprobs with the model's. `tokens` ends with the sampled tokens."""
    with torch.inference_mode():
        logits = reference()(torch.tensor([tokens])).logits[0].double()
    wanted = logits.log_softmax(-1)[before - 1 : -1]
    for place, row, token in zip(places, wanted, tokens[before:], strict=True):
        own, *others = place
        assert own.token_id == token
        assert [other.rank for other in others] == list(range(1, num_top_logprobs + 1))
        best = row.topk(num_top_logprobs).values.tolist()
        assert [other.logprob for other in others] == pytest.approx(best, abs=1e-3)
        for ranked in place:
            assert ranked.logprob == pytest.approx(float(row[ranked.token_id]), abs=1e-3)


async def test_top_logprobs_are_returned_for_sampled_tokens(engine: VllmEngine) -> None:
    """Siblings still hit the prefix cache."""
    prompt = prompt_of(2 * BLOCK + 3, first=7)
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    samples = [
        SampleRequest(
            id=f"t{next(_COUNT)}",
            prompt_token_ids=prompt,
            sampling=sampling,
            num_top_logprobs=4 if i else 0,
        )
        for i in range(3)
    ]
    before = computed_prompt_tokens()
    plain, *asking = await asyncio.gather(*await engine.submit(samples))
    assert computed_prompt_tokens() - before == len(prompt) + 2 * 3
    assert plain.top_logprobs is None
    for sample in asking:
        assert sample.top_logprobs is not None
        assert [place[0].logprob for place in sample.top_logprobs] == sample.logprobs
        assert_top_logprobs(sample.top_logprobs, prompt + sample.token_ids, len(prompt), 4)


async def test_top_logprobs_of_a_prompt_equal_those_of_the_model(engine: VllmEngine) -> None:
    prompt = engine.encode_text("Compute 12+34.\n")
    first, *rest = await engine.top_logprobs(prompt, 3)
    assert first == []
    assert_top_logprobs(rest, prompt, 1, 3)


async def test_logprobs_of_given_tokens_equal_those_of_the_model(engine: VllmEngine) -> None:
    """Also if top logprobs are computed in the same step, and over several prefill chunks."""
    prompt = prompt_of(400, first=9)
    given = np.random.default_rng(1).integers(0, 250, (len(prompt), 3)).astype(np.int32)
    both = [engine.top_logprobs(prompt, 2, None, given), engine.top_logprobs(prompt, 2)]
    several, top = await asyncio.gather(*both)
    with torch.inference_mode():
        logprobs = reference()(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    token_ids = np.column_stack([prompt, given])[1:]
    assert several.token_ids[1:].tolist() == token_ids.tolist()
    wanted = logprobs[:-1].gather(1, torch.from_numpy(token_ids).long())
    np.testing.assert_allclose(several.logprobs[1:], wanted, atol=1e-3)
    assert_top_logprobs(top[1:], prompt, 1, 2)


async def test_truncated_tokens_are_not_in_the_top_logprobs(engine: VllmEngine) -> None:
    sample = SampleRequest(
        id=f"t{next(_COUNT)}",
        prompt_token_ids=prompt_of(5, first=8),
        sampling=Sampling(max_tokens=4, top_k=2, ignore_eos=True),
        num_top_logprobs=4,
    )
    (completion,) = await asyncio.gather(*await engine.submit([sample]))
    assert completion.top_logprobs is not None
    for place in completion.top_logprobs:
        assert len(place) == 3
        assert sum(math.exp(other.logprob) for other in place[1:]) == pytest.approx(1, abs=1e-3)


async def test_every_token_carries_its_version(engine: VllmEngine) -> None:
    (sample,) = await run(engine, prompt_of(5, first=2), ignore_eos=True)
    (span,) = sample.versions
    assert (span.version, span.start, span.end) == ("v0", 0, 8)


async def test_seed_determines_the_stream_of_each_sample(engine: VllmEngine) -> None:
    prompt = prompt_of(40, first=3)
    one, two = [await run(engine, prompt, n=4, seed=5, max_tokens=24) for _ in range(2)]
    assert [s.token_ids for s in one] == [s.token_ids for s in two]
    assert len({tuple(s.token_ids) for s in one}) > 1


async def test_sample_ends_with_its_stop_token_or_at_its_limit(engine: VllmEngine) -> None:
    prompt = engine.encode_text("12+3")
    eos = engine.info.eos_token_ids[0]
    (ended,) = await run(engine, prompt, temperature=0.0, max_tokens=256)
    assert (ended.finish, ended.token_ids[-1]) == ("stop", eos)
    (ignoring,) = await run(engine, prompt, temperature=0.0, max_tokens=256, ignore_eos=True)
    assert (ignoring.finish, len(ignoring.token_ids)) == ("length", 256)
    stop = ended.token_ids[1]
    (stopped,) = await run(engine, prompt, temperature=0.0, stop_token_ids=(stop,))
    assert stopped.finish == "stop"
    assert stopped.token_ids == ended.token_ids[: ended.token_ids.index(stop) + 1]


async def test_blocks_of_the_cache_fill_its_bytes(engine: VllmEngine) -> None:
    info, cache_bytes = engine.info, settings().cache_bytes
    config = json.loads((MODEL / "config.json").read_text())
    num_heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    assert cache_bytes is not None and info.dtype == "float32"
    assert info.kv_bytes_per_token == 2 * num_heads * config["head_dim"] * 4
    assert info.num_blocks == cache_bytes // (info.kv_bytes_per_token * info.block_size)


async def test_sample_may_use_the_whole_context_and_no_more(engine: VllmEngine) -> None:
    limit = engine.info.max_context_tokens
    prompt = prompt_of(limit - 3, first=4)
    (sample,) = await run(engine, prompt, max_tokens=3, ignore_eos=True)
    assert (len(sample.token_ids), sample.finish) == (3, "length")


async def test_refused_request_leaves_nothing_in_the_engine(engine: VllmEngine) -> None:
    good = SampleRequest(
        id="good", prompt_token_ids=[5, 6], sampling=Sampling(max_tokens=900, ignore_eos=True)
    )
    bad = SampleRequest(id="bad", prompt_token_ids=[5] * 2000, sampling=Sampling(max_tokens=4))
    with pytest.raises(RequestRefused):
        await engine.submit([good, bad])
    ping = await engine.llm.engine_core.call_utility_async("coppice_ping")
    assert (ping["num_running"], ping["num_waiting"]) == (0, 0)


async def test_budget_for_cuda_graphs_has_no_effect_without_a_gpu(engine: VllmEngine) -> None:
    assert engine.stats(CudaGraphStats) == CudaGraphStats()


async def test_engine_info_matches_the_model(engine: VllmEngine) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    info = engine.info
    assert info.vocab_size == config["vocab_size"]
    per_head = config["num_hidden_layers"] * config["head_dim"]
    assert info.kv_bytes_per_token == 2 * 4 * per_head * config["num_key_value_heads"]
    assert info.num_blocks * BLOCK * info.kv_bytes_per_token <= 2**27
    assert info.max_context_tokens == 1024
    assert "/" not in info.model, "its name, not its directory"


async def test_weights_of_another_model_are_refused_by_name(
    engine: VllmEngine, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(CheckpointRefused, match=r"model\.safetensors"):
        engine.check_weights(tmp_path)
    engine.check_weights(MODEL)


async def test_messages_are_rendered_with_the_template_of_the_model(engine: VllmEngine) -> None:
    message = {"role": "user", "content": "12+3"}
    rendered = engine.encode_chat(ChatRequest(messages=[message]))
    assert engine.decode(rendered).count("12+3") == 1
    assert all(token < engine.info.vocab_size for token in rendered)


async def cached(engine: VllmEngine, prompt: list[int], salt: str | None = None) -> int:
    sample = SampleRequest(
        id=f"t{next(_COUNT)}",
        prompt_token_ids=prompt,
        sampling=Sampling(max_tokens=1),
        cache_salt=salt,
    )
    [pending] = await engine.submit([sample])
    return (await pending).num_cached_tokens


async def test_prefix_is_shared_only_within_a_salt(engine: VllmEngine) -> None:
    prompt = prompt_of(3 * BLOCK + 1, first=41)
    salts = [None, "a:1", "b:1", None, "a:1"]
    assert [await cached(engine, prompt, salt) for salt in salts] == [0, 0, 0, *[3 * BLOCK] * 2]


async def test_prefixes_are_not_hit_after_a_reset(engine: VllmEngine) -> None:
    prompt = prompt_of(3 * BLOCK + 1, first=42)
    assert [await cached(engine, prompt) for _ in range(2)] == [0, 3 * BLOCK]
    await engine.pause("keep")
    await engine.reset_prefix_cache()
    await engine.resume()
    assert await cached(engine, prompt) == 0
