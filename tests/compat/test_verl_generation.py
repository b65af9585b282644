"""Modules of coppice.integrations.verl that do not import verl.

tests/compat/with_ray.py runs verl itself.
"""

import asyncio
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coppice import AsyncRollouts, Unsupported
from coppice.integrations.verl.generation import (
    Generation,
    GenerationOutput,
    LengthLimits,
    RequestGate,
    join_outputs,
    options_of,
    support_of,
)
from coppice.integrations.verl.publisher import Publisher, ServerList
from coppice.integrations.weights_version_labels import LabelGenerator, step_of
from tests.compat.third_party import Foreign, foreign
from tests.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
LENGTHS = LengthLimits(prompt=16, response=8, context=512)
# As verl's agent loops send them.
ASKED = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
}


@asynccontextmanager
async def generating(
    tmp_path: Path, engine: FakeEngine
) -> AsyncIterator[tuple[Generation, Foreign]]:
    async with foreign(tmp_path, engine) as served:
        generation = Generation(AsyncRollouts(served.url), LENGTHS)
        try:
            yield generation, served
        finally:
            await generation.close()


async def started(engine: FakeEngine, samples: int) -> None:
    """Returns once the engine has this many samples."""
    while len(engine.running) < samples:
        await asyncio.sleep(0.001)


def generate(generation: Generation, name: str, **asked: Any) -> "asyncio.Task[GenerationOutput]":
    return asyncio.create_task(generation.generate(name, [1, 2, 3], {**ASKED, **asked}))


async def test_response_has_a_logprob_per_token_and_cached_prompt_tokens(
    tmp_path: Path,
) -> None:
    async with generating(tmp_path, FakeEngine()) as (generation, served):
        drawn = await generate(generation, "one")
        without = await generate(generation, "two", logprobs=False)
    [request, _] = served.engine.submitted
    assert request.sampling.max_tokens == LENGTHS.response
    assert drawn.stop_reason == "completed"
    assert drawn.log_probs is not None and len(drawn.token_ids) == len(drawn.log_probs) == 8
    assert drawn.extra_fields["num_cached_tokens"] == 0
    assert drawn.extra_fields["global_steps"] is None, "of no version of verl's"
    assert without.log_probs is None


async def test_supports_of_the_tokens_are_returned_if_configured(tmp_path: Path) -> None:
    configured = ServerList.of({"coppice": {"urls": "http://a", "return_support": True}})
    assert (
        configured.return_support and not ServerList.of({"coppice": {"urls": "b"}}).return_support
    )
    async with foreign(tmp_path, FakeEngine()) as served:
        generation = Generation(AsyncRollouts(served.url), LENGTHS, return_support=True)
        drawn = await generate(generation, "one", top_p=0.9)
        await generation.close()
    field = drawn.extra_fields["support"]
    support = support_of(field)
    assert len(support) == len(drawn.token_ids) == 8
    joined = join_outputs([field, field])
    assert joined is not None and support_of(joined).rows == support.rows * 2
    assert np.array([field, None], dtype=object).shape == (2,), "not split by NumPy"


@pytest.mark.parametrize("num_top", [0, 3])
async def test_teacher_request_returns_logprobs_of_its_tokens(tmp_path: Path, num_top: int) -> None:
    """As verl's teachers request them; rows are for the next token, and the last is padding."""
    sequence = [1, 2, 3, 4]
    async with foreign(tmp_path, FakeEngine()) as served, AsyncRollouts(served.url) as rollouts:
        generation = Generation(AsyncRollouts(served.url), LENGTHS)
        asked = {"max_tokens": 1, "prompt_logprobs": num_top, "detokenize": False}
        output = await generation.generate("one", sequence, {"temperature": 1.0, **asked})
        [score] = await rollouts.score([([1], [[2, 3, 4]])], top_logprobs=3)
        await generation.close()
    ids, logprobs = (output.extra_fields[name] for name in ("prompt_ids", "prompt_logprobs"))
    assert ids.shape == logprobs.shape == (4, num_top or 1)
    assert score.top_logprobs is not None
    exact = ([[2], [3], [4]], score.logprobs[0][:, None])
    expected = score.top_logprobs[0].padded() if num_top else exact
    assert np.array_equal(ids[:-1], expected[0]) and np.array_equal(logprobs[:-1], expected[1])
    assert not ids[-1].any() and not logprobs[-1].any()


async def test_abort_returns_the_tokens_so_far_and_holds_later_requests(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(instant=False)
    async with generating(tmp_path, engine) as (generation, _):
        running = generate(generation, "running")
        await started(engine, 1)
        for _ in range(3):
            engine.step()
        assert await generation.abort_all(reject=False) == ["running"]
        drawn = await running
        assert (drawn.stop_reason, len(drawn.token_ids)) == ("aborted", 3)
        assert drawn.log_probs is not None and len(drawn.log_probs) == 3
        waiting = generate(generation, "waiting")
        await asyncio.sleep(0.05)
        assert not engine.running
        generation.resume()
        await started(engine, 1)
        engine.finish = "length"
        while engine.running:
            engine.step()
            await asyncio.sleep(0)
        assert (await waiting).stop_reason == "completed"


async def test_waiting_requests_are_rejected_when_the_replica_leaves(tmp_path: Path) -> None:
    async with generating(tmp_path, FakeEngine()) as (generation, served):
        await generation.abort_all(reject=False)
        waiting = generate(generation, "waiting")
        await asyncio.sleep(0)
        await generation.abort_all(reject=True)
        for turned_away in (waiting, generate(generation, "late")):
            assert await turned_away == GenerationOutput(
                token_ids=[], log_probs=None, stop_reason="aborted"
            )
        assert not served.engine.submitted
        generation.resume()
        assert (await generate(generation, "after")).stop_reason == "completed"


async def test_gate_closes_after_requests_in_transit_have_arrived() -> None:
    gate = RequestGate()
    assert await gate.admit()
    shutting = asyncio.create_task(gate.shut(reject=False))
    await asyncio.sleep(0)
    assert not shutting.done()
    gate.admitted()
    await shutting


async def test_published_weights_reach_all_servers_and_name_their_step(tmp_path: Path) -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with (
        generating(tmp_path / "a", engines[0]) as (generation, one),
        generating(tmp_path / "b", engines[1]) as (_, two),
    ):
        publisher = Publisher(ServerList(urls=(one.url, two.url)))
        label = await publisher.publish(iter([("w", torch.ones(2, 2))]), 7)
        assert [s.server.versions.active.label for s in (one, two)] == [label] * 2
        drawn = await generate(generation, "one")
        again = await publisher.publish(iter([("w", torch.zeros(2, 2))]), 7)
    assert again != label, "the same step, other weights"
    assert [drawn.extra_fields[f"{edge}global_steps"] for edge in ("", "min_", "max_")] == [7] * 3


def test_labels_encode_their_step() -> None:
    labels = LabelGenerator("verl")
    assert [step_of(labels.next(step)) for step in (0, 12, None)] == [0, 12, None]
    assert step_of("trl-1a2b3c4d-12") is None
    assert labels.next(1) != LabelGenerator("verl").next(1)


@pytest.mark.parametrize(
    ("asked", "num_prompt_tokens", "max_tokens"),
    [
        ({}, 10, 8),
        ({}, 20, 4),
        ({"max_tokens": 300}, 10, 300),
        ({"max_new_tokens": 3}, 10, 3),
        ({"max_tokens": 300}, 500, 12),
        ({}, 30, 1),
    ],
)
def test_responses_are_as_long_as_in_verl(
    asked: dict[str, Any], num_prompt_tokens: int, max_tokens: int
) -> None:
    assert options_of(asked, LENGTHS, num_prompt_tokens)["max_tokens"] == max_tokens


def test_prompt_without_room_for_a_response_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        options_of({}, LENGTHS, 512)


@pytest.mark.parametrize(
    ("name", "value"),
    [("repetition_penalty", 1.1), ("min_p", 0.1), ("stop", ["\n"]), ("prompt_logprobs", 1)],
)
def test_parameter_that_changes_samples_is_refused_with_advice(name: str, value: Any) -> None:
    with pytest.raises(Unsupported, match=f"{name}=.*: (reward|use|ask) "):
        options_of({name: value}, LENGTHS, 3)


def test_min_p_is_served_if_the_actor_replays_supports() -> None:
    options = options_of({**ASKED, "min_p": 0.1}, LENGTHS, 3, return_support=True)
    assert options.get("min_p") == 0.1
    with pytest.raises(Unsupported, match="without penalties"):
        options_of({"repetition_penalty": 1.1}, LENGTHS, 3, return_support=True)


def test_greedy_validation_is_supported() -> None:
    options = options_of({**ASKED, "temperature": 0, "top_k": 5, "n": 1}, LENGTHS, 3)
    assert options == {"temperature": 0, "top_p": 1.0, "top_k": 5, "max_tokens": 8}


def test_target_needs_an_address_and_reads_its_key_from_a_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    given = {"coppice": {"urls": ["http://a", "http://b"], "key_file": str(key)}}
    target = ServerList.of(given)
    assert [target.url(replica) for replica in range(3)] == ["http://a", "http://b", "http://a"]
    assert target.key() == "secret"
    assert ServerList.given("http://a", None).urls == ("http://a",)
    with pytest.raises(ValueError, match="urls"):
        ServerList.of({})


def test_verl_plugin_module_exists() -> None:
    project = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
    assert find_spec(project["entry-points"]["verl.plugins"]["coppice"]) is not None
