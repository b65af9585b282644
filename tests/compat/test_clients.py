"""Released third-party clients against a real server with the shipped model."""

import importlib.metadata
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from packaging.utils import canonicalize_name
from transformers import AutoTokenizer

from examples.agent.calculator import call_calculator
from examples.agent.rollout import rollout
from examples.seedling.enlarge import SEEDLING
from tests.compat.programs import ROOT, install, run_client_program
from tests.invariants.service_process import home, service

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.long]

ENVIRONMENTS = ["clients"]


@pytest.fixture(scope="module")
def installed() -> None:
    install(*ENVIRONMENTS)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory where a trainer saves adapters."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def url(installed: None, adapters: Path) -> Iterator[str]:
    settings = {
        "--engine.dtype": "float32",
        "--engine.seed": "0",
        "--engine.max-adapters": "4",  # two of an earlier test, two of one that replaces its own
        "--weights.source-directories": str(adapters),
    }
    with home() as place, service(place, *(t for pair in settings.items() for t in pair)) as served:
        yield served.url


def scored(url: str) -> list[float]:
    items = [{"prompt": {"text": "Compute 12+34.\n"}, "responses": [[5, 6, 7]]}]
    answer = httpx.post(f"{url}/v1/score", json={"items": items}).json()
    logprobs: list[float] = answer["items"][0]["responses"][0]["logprobs"]
    return logprobs


def test_pinned_versions_are_the_tested_ones(installed: None) -> None:
    lock = (ROOT / "requirements" / "clients.txt").read_text()
    pinned = re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)
    found = importlib.metadata.distributions(path=[str(ROOT / ".clients")])
    present = {canonicalize_name(each.name): each.version for each in found}
    assert len(pinned) > 10
    assert {name: present[canonicalize_name(name)] for name, _ in pinned} == dict(pinned)


def test_renderers_samples_two_turns_without_retokenizing(url: str) -> None:
    answer = run_client_program(ENVIRONMENTS, "renderers_generate", url)
    for turn in (answer["first"], answer["second"]):
        assert len(turn["completion_ids"]) == len(turn["completion_logprobs"]) > 0
    first, second = answer["first"], answer["second"]
    sent = [*first["prompt_ids"], *first["completion_ids"], *first["prompt_ids"]]
    assert second["prompt_ids"] == sent
    known = len(first["prompt_ids"]) + len(first["completion_ids"])
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (known - 1) // 32 * 32 > 0, "whole blocks of the first turn, and all of them"
    assert "maximum context length" in answer["overlong"]


def test_trl_serves_the_adapters_of_its_trainer(url: str, adapters: Path) -> None:
    answer = run_client_program(ENVIRONMENTS, "trl_adapters", url, str(adapters))
    assert answer["adapters"] is True, "it would publish them, and not whole models"
    names = [f"trl-policy-v{version}" for version in range(3)]
    assert answer["models"][1:] == names[1:], "the stalest is unloaded"
    for step, name in zip(answer["steps"], names, strict=True):
        assert step["adapter"].startswith(f"{name}@")
        assert step["served"] == pytest.approx(step["trainer"], abs=1e-3)


def test_turns_of_an_agent_hit_the_prefix_cache_of_earlier_turns(url: str) -> None:
    words = AutoTokenizer.from_pretrained(SEEDLING)
    problem = "Compute 12+34+56+78-90+11+22+33+44+55.\n"
    with httpx.Client(base_url=url, timeout=60) as http:
        rows = [rollout(http, words, problem, session=f"t{i}") for i in range(4)]
    row = max(rows, key=lambda row: len(row.cached_tokens))
    assert len(row.cached_tokens) > 2, "the seedling writes most sums out, line by line"
    # Prefix hits are whole blocks of everything that earlier turns sent or sampled.
    assert row.cached_tokens == sorted(row.cached_tokens)
    assert row.cached_tokens[-1] >= len(row.prompt) // 32 * 32 > 0
    assert len(row.response) == len(row.logprobs) == len(row.sampled)
    assert not all(row.sampled)
    first = row.sampled.index(False)
    asked = words.decode(row.response[:first]).split("\n")[-1]
    told = words.decode(row.response[first : row.sampled.index(True, first)])
    assert told == call_calculator(asked), f"the calculator's answer to {asked}"


def test_session_of_sglang_clients_hits_its_first_turn(url: str) -> None:
    """Its key is meant for routers; here the prefix cache finds the turn by its tokens."""
    headers = {"X-SMG-Routing-Key": "session-1"}
    tokens = [11, 12, 13, 14, 15, 16, 17, 18] * 9
    cached = []
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        for _ in range(2):
            sampling = {"max_new_tokens": 32, "ignore_eos": True}
            body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
            answer = http.post("/generate", json=body).json()
            drawn = [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
            assert drawn == answer["output_ids"]
            cached.append(answer["meta_info"]["cached_tokens"])
            tokens = [*tokens, *drawn, 19]
    assert cached == [0, (72 + 31) // 32 * 32]


def test_openai_client_chats_with_the_shipped_model(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as speaker:
        asked: Any = [{"role": "user", "content": "Compute 12+34."}]
        answer = speaker.chat.completions.create(
            model=speaker.models.list().data[0].id, messages=asked, temperature=0, max_tokens=64
        )
    assert answer.choices[0].finish_reason == "stop"
    assert re.search(r"answer: \d+", answer.choices[0].message.content or "")


def test_trl_trains_and_serves_the_updated_weights(url: str) -> None:
    """Through a rollout_func, with full weights and an adapter, and in server mode over HTTP."""
    before = scored(url)
    runs = run_client_program(ENVIRONMENTS, "trl_grpo", url)
    for run in runs.values():
        assert all(norm > 0 for norm in run["grad_norms"]) and len(run["grad_norms"]) == 2
        assert run["scores"] != pytest.approx(before, abs=1e-6)
    assert runs["adapter"]["sequence"] == 0, "the base stays as it is"
    assert runs["adapter"]["adapter"].endswith("-2"), "one version for each step"
    assert runs["rollout_func"]["sequence"] == 2
    assert all(runs[name]["version"].startswith("trl-") for name in ("rollout_func", "server_mode"))
    assert runs["server_mode"]["sequence"] == 6
    lowest, highest, num_tokens = runs["support"]["token_ratios"]
    assert num_tokens > 100 and (lowest, highest) == pytest.approx((1.0, 1.0), abs=1e-3)
    # The trainer's own correction compares its logprobs with those of the server.
    assert runs["server_mode"]["ratios"] == [pytest.approx(1.0, abs=0.01)] * 2


def test_trl_gets_the_top_logprobs_of_given_tokens_from_a_teacher(url: str) -> None:
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": "Compute 12+34.\n12+34"}).json()[
        "tokens"
    ]
    item = {"prompt": {"token_ids": tokens[:9]}, "responses": [tokens[9:]]}
    score = httpx.post(f"{url}/v1/score", json={"items": [item]}).json()
    answer = run_client_program(ENVIRONMENTS, "trl_teacher", url, json.dumps(tokens), "9")
    [actual], [logprobs] = answer["actual_logprobs"], answer["logprobs"]
    expected = score["items"][0]["responses"][0]["logprobs"]
    assert [one for [one] in actual] == pytest.approx(expected, abs=1e-3)
    assert all(len(top) == 3 and top == sorted(top, reverse=True) for top in logprobs)


def test_trl_distills_from_the_server_as_its_teacher(url: str) -> None:
    for run in run_client_program(ENVIRONMENTS, "trl_distillation", url).values():
        assert len(run["loss"]) == 3 and all(math.isfinite(loss) for loss in run["loss"])
        assert all(norm > 0 for norm in run["grad_norm"])


def test_echoed_log_likelihoods_equal_those_of_score(url: str) -> None:
    """As lm-eval sends them, with the tokens of a text from the tokenizer's route."""
    with httpx.Client(base_url=url, timeout=60) as http:
        tokens = http.post("/tokenize", json={"prompt": "Compute 12+34.\n"}).json()["tokens"]
        body = {"prompt": [tokens], "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        [choice] = http.post("/v1/completions", json=body).json()["choices"]
        item = {"prompt": {"token_ids": tokens[:3]}, "responses": [tokens[3:]]}
        score = http.post("/v1/score", json={"items": [item]}).json()
    echoed = choice["logprobs"]
    assert "".join(echoed["tokens"]) == choice["text"]
    assert choice["text"].startswith("Compute 12+34.\n")
    assert echoed["text_offset"][len(tokens)] == len("Compute 12+34.\n")
    assert echoed["token_logprobs"][3:-1] == pytest.approx(
        score["items"][0]["responses"][0]["logprobs"], abs=1e-3
    )
    greedy = echoed["token_logprobs"][-1]
    assert greedy == max(echoed["top_logprobs"][-1].values())


def test_trl_distills_asynchronously(url: str) -> None:
    """Publishes weights, so it is the last test of this server."""
    run = run_client_program(ENVIRONMENTS, "trl_async_distillation", url)
    assert run["version"].startswith("trl-")
    assert run["num_published"] == 3, "before the first step and after each"
    assert len(run["log"]) == 2
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in run["log"])
