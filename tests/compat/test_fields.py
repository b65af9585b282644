"""Fields of other servers: dropped, ignored and counted, or refused with advice."""

import asyncio
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from engine.types.samples import SampleRequest
from service.compat.unsupported_fields import INTERNAL_FIELDS, NEUTRAL, REFUSED
from tests.compat.third_party import Foreign, foreign, wrong_status
from tests.service.keyfile import bearer, write_keys

COMPLETION = {"prompt": [5, 6, 7], "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
GENERATE = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}
SGLANG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/inference/v1/generate": GENERATE,
    "/generate": SGLANG,
}
NESTED = [(path, "sampling_params") for path in ("/inference/v1/generate", "/generate")]
PLACES: list[tuple[str, str | None]] = [*((path, None) for path in BODIES), *NESTED]
# Fields that other routes refuse.
SERVED: set[tuple[tuple[str, str | None], str]] = {
    (("/v1/completions", None), "prompt_logprobs"),
    (("/inference/v1/generate", "sampling_params"), "prompt_logprobs"),
    (("/v1/chat/completions", None), "top_logprobs"),
    (("/v1/completions", None), "add_special_tokens"),
    (("/v1/completions", None), "echo"),
    (("/v1/chat/completions", None), "echo"),
    (("/v1/completions", None), "truncate_prompt_tokens"),
    (("/v1/chat/completions", None), "truncate_prompt_tokens"),
    (("/v1/completions", None), "truncation_side"),
    (("/v1/chat/completions", None), "truncation_side"),
    (("/generate", None), "lora_path"),
    (("/generate", None), "input_ids"),
}


# Neutral fields that some of the routes serve.
WITH_EFFECT = {"request_id", "rid", "extra_key", "cache_salt"}


def placed(path: str, inside: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    body = BODIES[path]
    return {**body, inside: {**body[inside], **fields}} if inside else {**body, **fields}


def nameless(samples: list[SampleRequest]) -> list[SampleRequest]:
    """Requests without the fields that differ between requests: names and arrival rank."""
    return [replace(sample, id="", group="", priority=0) for sample in samples]


async def submitted(served: Foreign, path: str, body: dict[str, Any]) -> list[SampleRequest]:
    served.engine.submitted.clear()
    await served.post(path, body)
    return nameless(served.engine.submitted)


async def test_engine_internals_are_dropped(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        for (path, inside), name in product(PLACES, sorted(INTERNAL_FIELDS)):
            plain = await submitted(served, path, BODIES[path])
            before = served.ignored("dropped")
            dropped = placed(path, inside, {name: {"coppice_handle": "x"}})
            assert await submitted(served, path, dropped) == plain
            assert served.ignored("dropped") == before + 1


async def test_neutral_field_changes_nothing(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        for path, inside in PLACES:
            plain = await submitted(served, path, BODIES[path])
            neutral = dict.fromkeys(NEUTRAL.keys() - WITH_EFFECT, 1)
            assert await submitted(served, path, placed(path, inside, neutral)) == plain
        assert served.ignored("unknown") == 0


async def test_unknown_field_is_refused_by_name(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        for path, inside in PLACES:
            await served.post(path, placed(path, inside, {"no_such_field": None}))
            served.engine.submitted.clear()
            _, problem = await served.refused(path, placed(path, inside, {"no_such_field": 1}))
            [error] = problem["errors"]
            assert error["location"] == "no_such_field"
            assert served.engine.submitted == []


async def test_unknown_field_of_a_message_is_ignored_and_counted(tmp_path: Path) -> None:
    """Clients send back messages of other servers."""
    async with foreign(tmp_path) as served:
        plain = await submitted(served, "/v1/chat/completions", CHAT)
        message = {"role": "user", "content": "abc", "refusal": "no", "annotations": None}
        body = {**CHAT, "messages": [message]}
        assert await submitted(served, "/v1/chat/completions", body) == plain
        assert served.ignored("unknown") == 1


async def test_field_at_its_neutral_value_is_accepted(tmp_path: Path) -> None:
    allowed_values = {
        name: refusal.allowed_values[0]
        for name, refusal in REFUSED.items()
        if refusal.allowed_values
    }
    async with foreign(tmp_path) as served:
        for path, inside in PLACES:
            await served.post(path, placed(path, inside, allowed_values))
        assert served.ignored("unknown") == 0


async def test_field_that_would_change_samples_is_refused_with_advice(
    tmp_path: Path,
) -> None:
    async with foreign(tmp_path) as served:
        for (path, inside), name in set(product(PLACES, sorted(REFUSED))) - SERVED:
            status, problem = await served.refused(path, placed(path, inside, {name: ["a", 0.5]}))
            assert (status, problem["code"]) == (wrong_status(path), "invalid_request")
            assert problem["errors"] == [{"location": name, "message": REFUSED[name].suggestion}]
        assert served.engine.submitted == []


async def test_extra_body_is_accepted_if_it_repeats_fields_of_the_request(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        for path, body in BODIES.items():
            whole = await submitted(served, path, {**body, "stream": False})
            repeated = {"stream": False, "extra_body": {"stream": False}}
            assert await submitted(served, path, {**body, **repeated}) == whole
            served.engine.submitted.clear()
            wrong: tuple[object, ...] = (
                {"stream": False},
                {"temperature": 0.5},
                {"copy": True},
                {"model": None},
                dict.fromkeys(map(str, range(65)), True),
            )
            for given in wrong:
                status, problem = await served.refused(path, {**body, "extra_body": given})
                assert (status, problem["errors"][0]["location"]) == (
                    wrong_status(path),
                    "extra_body",
                )
        assert served.engine.submitted == []


async def test_cache_salt_is_private_to_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secrets = write_keys(file, one="rollout", two="rollout")
    async with foreign(tmp_path, server={"keys_file": file}) as served:
        for secret in secrets.values():
            body = {**GENERATE, "cache_salt": "7"}
            await served.post("/inference/v1/generate", body, headers=bearer(secret))
        await served.post("/inference/v1/generate", GENERATE, headers=bearer(secrets["one"]))
        salts = [sample.cache_salt for sample in served.engine.submitted]
    assert salts == ["one:7", "two:7", None]


async def test_numbers_are_bounded_as_in_the_native_contract(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        for field in ({"temperature": 3}, {"top_p": 0}, {"top_k": -2}, {"n": 5000}):
            status, problem = await served.refused("/v1/completions", {**COMPLETION, **field})
            assert (status, problem["code"]) == (400, "invalid_request")


async def test_limits_and_metrics_apply(tmp_path: Path) -> None:
    async with foreign(tmp_path, limits={"max_body_bytes": 1024}) as served:
        await served.post("/v1/completions", {**COMPLETION, "n": 2})
        status, _ = await served.refused(
            "/v1/completions", {**COMPLETION, "prompt": ["a"] * 65, "n": 1024}
        )
        large, _ = await served.refused("/v1/completions", {**COMPLETION, "user": "x" * 2000})
        metric = served.server.metrics.registry.get_sample_value
        labels = {"route": "/v1/completions", "code": "200"}
        assert metric("coppice_requests_total", labels) == 1
        assert metric("coppice_completion_tokens_total") == 8
    assert (status, large) == (400, 413)


async def test_disconnected_client_ends_its_samples(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        served.engine.instant = False
        asking = asyncio.create_task(served.http.post("/v1/completions", json=COMPLETION))
        while not served.engine.running:
            await asyncio.sleep(0.001)
        asking.cancel()
        while served.engine.running:
            await asyncio.sleep(0.001)


async def test_version_can_be_requested(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        for path, body in BODIES.items():
            early = {**body, "weights": {"min_version": "v9"}}
            status, problem = await served.refused(path, early)
            assert (status, problem["code"]) == (503, "version_unavailable")
            await served.post(path, {**body, "weights": {"exact_version": "v0"}})
