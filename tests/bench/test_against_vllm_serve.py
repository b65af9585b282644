"""Requests of the benchmark against `vllm serve`, and its record."""

import json
from pathlib import Path

from bench.against_vllm_serve import (
    CASES,
    EQUAL,
    STOCK,
    UNSHARED,
    coppice_options,
    record,
    vllm_environments,
    vllm_options,
    with_context,
)
from bench.harness.group_requests import Arm, Case, Measurement, generated_tokens
from engine.settings import EngineSettings


def arm(name: str, *rates: float, is_native: bool = False) -> Arm:
    runs = [
        Measurement(tokens_per_second=rate, group_seconds=1 / rate, processor_seconds=1.0)
        for rate in (1.0, *rates)  # the first is the warm-up
    ]
    made = Arm(name=name, url="http://127.0.0.1:1", model="m", is_native=is_native)
    made.measured.update({case: list(runs) for case in CASES})
    return made


def test_both_servers_get_the_same_settings() -> None:
    settings = EngineSettings(
        max_sequences=64, max_batched_tokens=2048, max_context_tokens=5120, cache_bytes=2**30
    )
    ours, theirs = coppice_options(settings), vllm_options(settings)
    pairs = {
        "--engine.max-sequences": "--max-num-seqs",
        "--engine.max-batched-tokens": "--max-num-batched-tokens",
        "--engine.max-context-tokens": "--max-model-len",
        "--engine.cache-bytes": "--kv-cache-memory-bytes",
        "--engine.block-size": "--block-size",
        "--engine.dtype": "--dtype",
        "--engine.model": "--model",
    }
    assert [ours[name] for name in pairs] == [theirs[name] for name in pairs.values()]
    assert len(vllm_environments(settings)) == 2


def test_requests_of_both_routes_have_the_same_samples() -> None:
    native, openai = arm("native", is_native=True), arm("openai")
    [group] = native.body([1, 2], 8, 64)["groups"]
    completion = openai.body([1, 2], 8, 64)
    assert group == {"prompt": {"token_ids": completion["prompt"]}, "n": completion["n"]}
    assert native.body([1, 2], 8, 64)["sampling"].items() <= completion.items()
    assert generated_tokens({"usage": {"num_generated_tokens": 5}}) == 5
    assert generated_tokens({"usage": {"completion_tokens": 6}}) == 6


def test_prompts_are_new_in_every_run_and_one_group_is_long() -> None:
    case = Case(name="", num_groups=3, group_size=2, prompt_tokens=4, num_long=1, long_tokens=512)
    first, second = case.prompts(), case.prompts()
    assert len({tuple(prompt) for prompt in (*first, *second)}) == 6
    assert case.lengths() == [512, 64, 64]


def test_record_compares_the_servers_in_each_case_and_the_threads_without_sharing() -> None:
    arms = [
        arm("native", 4.0, 6.0),
        arm("openai", 3.0, 4.5),
        arm(STOCK, 2.0, 3.0),
        arm(EQUAL, 4.0, 6.0),
    ]
    rows = {row.what: row for row in record(list(CASES.values()), arms, "float32").rows}
    for case in CASES:
        row = rows[f"{case}: tokens/s, rollouts / vllm serve"]
        assert row.value == "2.00 [2.00, 2.00]" and row.verdict == "met"
        row = rows[f"{case}: tokens/s, our OpenAI route / {EQUAL}"]
        assert row.value == "0.75 [0.75, 0.75]" and row.verdict == "missed"
        assert rows[f"{case}: time to a whole group, vllm serve / rollouts"].value[:4] == "2.00"
    assert rows[f"{UNSHARED}: tokens/s, {EQUAL} / vllm serve"].value == "2.00 [2.00, 2.00]"


def test_context_length_of_the_model_is_extended(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096, "head_dim": 64}')
    with_context(tmp_path, 8192)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"max_position_embeddings": 8192, "head_dim": 64}
