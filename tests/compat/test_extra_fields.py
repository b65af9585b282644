"""Weights versions, supports and constraints on the routes that vLLM's serving classes answer."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import saved_adapter
from tests.compat.third_party import Foreign, foreign
from tests.compat.wires import (
    BODIES,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    PATHS,
    code_of,
    ends,
    events_of,
    sampled,
    samples,
)
from tests.fake_engine import FakeEngine

EXTRA = {"return_weight_versions": True, "return_support": True}
SPANS = [{"version": "v0", "start": 0, "end": 4}]


async def streamed(served: Foreign, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await served.http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return ends(path, events_of(answer.text))


@pytest.mark.parametrize("path", PATHS)
async def test_fields_are_those_of_the_native_answer(tmp_path: Path, path: str) -> None:
    native = {"groups": [{"prompt": {"text": "abc"}}], "sampling": {"max_tokens": 4}}
    async with foreign(tmp_path) as served:
        rollout = await served.post("/v1/rollouts", {**native, "return_support": True})
        support = rollout["groups"][0]["samples"][0]["support"]
        [whole] = samples(path, await served.post(path, {**BODIES[path], **EXTRA}))
        [last] = await streamed(served, path, {**BODIES[path], **EXTRA})
    assert len(support["lengths"]) == 4
    for found in (whole, last):
        assert (found["weight_versions"], found["support"]) == (SPANS, support)


@pytest.mark.parametrize("path", PATHS)
async def test_fields_that_are_not_requested_are_absent(tmp_path: Path, path: str) -> None:
    """vLLM's own response of /inference/v1/generate has the versions."""
    async with foreign(tmp_path) as served:
        [whole] = samples(path, await served.post(path, BODIES[path]))
        [last] = await streamed(served, path, BODIES[path])
        assert not any(sample.support for sample in served.engine.submitted)
    for found in (whole, last):
        assert "support" not in found
        assert ("weight_versions" in found) == (path == GENERATE)


@pytest.mark.parametrize(("path", "n"), [(CHAT, 3), (COMPLETIONS, "3"), (GENERATE, 3)])
async def test_every_choice_has_its_own_fields(tmp_path: Path, path: str, n: object) -> None:
    """The supports of prompts of other lengths differ. vLLM's models read "3" as a number."""
    prompts = {"prompt": [[1], [1, 2], [1, 2, 3]]} if path == COMPLETIONS else {}
    body = {**sampled(path, n=n), **prompts, **EXTRA}
    async with foreign(tmp_path) as served:
        whole = samples(path, await served.post(path, body))
        chunks = await streamed(served, path, body)
    assert [choice["index"] for choice in whole] == list(range(9 if prompts else 3))
    expected = [(choice["weight_versions"], choice["support"]) for choice in whole]
    assert [(choice["weight_versions"], choice["support"]) for choice in chunks] == expected
    if prompts:
        supports = [str(support) for _, support in expected]
        assert [supports.index(support) for support in supports] == [0, 0, 0, 3, 3, 3, 6, 6, 6]


async def test_version_that_changes_in_a_sample_is_reported(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with foreign(tmp_path, engine) as served:
        body = {**BODIES[CHAT], **EXTRA, "stream": True}
        async with served.http.stream("POST", CHAT, json=body) as answer:
            while not engine.running:
                await asyncio.sleep(0.001)
            engine.step(1)
            engine.version = "v1"
            engine.step(3)
            [last] = ends(CHAT, events_of((await answer.aread()).decode()))
    assert last["weight_versions"] == [
        {"version": "v0", "start": 0, "end": 1},
        {"version": "v1", "start": 1, "end": 4},
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*EXTRA, "weights"])
async def test_invalid_extra_field_is_refused_by_name(tmp_path: Path, path: str, name: str) -> None:
    async with foreign(tmp_path) as served:
        for wrong in ("yes", [1], {"exact_version": 1, "min_version": "v0"}):
            answer = await served.http.post(path, json={**BODIES[path], name: wrong})
            assert answer.status_code == 400
            assert name in answer.json()["error"]["message"]
        assert served.engine.submitted == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"tokens": [97]}),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": BODIES[CHAT]["messages"]}),
    ],
)
async def test_response_without_a_sample_has_no_extra_fields(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with foreign(tmp_path) as served:
        plain = await served.post(path, body)
        assert await served.post(path, {**body, **EXTRA}) == plain


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_weights_are_constrained(tmp_path: Path, path: str, stream: bool) -> None:
    """The error of a stream comes before it begins."""
    unavailable = 529 if path == MESSAGES else 503
    async with foreign(tmp_path) as served:
        for weights, status, code in (
            ({"min_version": "v9"}, unavailable, "version_unavailable"),
            ({"exact_version": "v9"}, 409, "version_superseded"),
        ):
            body = {**BODIES[path], "weights": weights, "stream": stream}
            answer = await served.http.post(path, json=body)
            assert (answer.status_code, code_of(answer)) == (status, code)
        assert served.engine.submitted == []
        for served_weights in ({"exact_version": "v0"}, {"min_version": "v0"}, None):
            body = {**BODIES[path], "weights": served_weights, "stream": stream}
            assert (await served.http.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_adapter_is_found_by_the_name_of_the_model(tmp_path: Path, path: str) -> None:
    sources = {"source_directories": [tmp_path / "out"]}
    async with foreign(tmp_path, FakeEngine(max_adapters=1), weights=sources) as served:
        directory = str(saved_adapter(tmp_path / "out" / "a"))
        await served.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": directory})
        body = {**BODIES[path], "model": "policy", **EXTRA}
        answer = await served.post(path, body)
        unknown = await served.http.post(path, json={**body, "model": "other"})
        prompts = [sample.adapter for sample in served.engine.submitted]
    [sample] = samples(path, answer)
    assert sample["weight_versions"] == [{**SPANS[0], "adapter": "policy@update-1"}]
    assert (answer["model"], prompts) == ("policy", ["policy@update-1"])
    assert (unknown.status_code, "does not exist" in unknown.text) == (404, True)
