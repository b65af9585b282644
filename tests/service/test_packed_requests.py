"""Packed requests: equal to the same requests as JSON, and refused if they are malformed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from coppice.wire.packed.requests import PACKED_MEDIA_TYPE, pack_request
from coppice.wire.rollouts import RolloutRequest
from coppice.wire.score import ScoreRequest
from service.http.bodies import MAX_JSON_VALUES
from tests.fake_engine import FakeEngine
from tests.serving import serving

PACKED = {"content-type": PACKED_MEDIA_TYPE}
SAMPLE = {
    "token_ids": [5, 6],
    "logprobs": [-0.1, -1 / 3],
    "raw_logprobs": [-0.2, -1e-9],
    "versions": [{"version": "v0", "start": 0, "end": 2}],
}
REQUEST: dict[str, Any] = {
    "groups": [
        {"prompt": {"token_ids": [1, 2, 3]}, "n": 2},
        {"prompt": {"spans": [{"token_ids": [4]}, {"token_ids": [5, 6]}]}},
        {"prompt": {"text": "a"}},
        {"prompt": {"token_ids": [7]}},
    ],
    "sampling": {"max_tokens": 3, "stop_token_ids": [9], "allowed_token_ids": [1, 9]},
    "continue_from": {"samples": [SAMPLE, {**SAMPLE, "group": 3}]},
}
PROMPT: dict[str, Any] = {"groups": [{"prompt": {"token_ids": 0}}], "sampling": {"max_tokens": 1}}


def rollout(**fields: Any) -> RolloutRequest:
    return RolloutRequest.model_validate({**REQUEST, **fields})


def packed(request: object = PROMPT, **tensors: Any) -> bytes:
    """A packed request with the given document and tensors; those of a prompt by default."""
    given = {"token_ids": np.array([1, 2], np.int32), "token_ids.offsets": np.array([0, 2])}
    present = {name: t for name, t in {**given, **tensors}.items() if t is not None}
    document = request if isinstance(request, str) else json.dumps(request)
    data: bytes = save(present, metadata={"request": document})
    return data


def with_header(change: Callable[[Any], Any]) -> bytes:
    """A packed request whose header is changed, and not its tensors."""
    data = packed()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def changed(name: str, **fields: Any) -> bytes:
    return with_header(lambda header: {**header, name: {**header[name], **fields}})


async def test_rollout_is_the_same_in_either_form(tmp_path: Path) -> None:
    engine = FakeEngine()
    request = rollout(continue_from=None, groups=REQUEST["groups"][:1] + REQUEST["groups"][2:])
    headers = {"idempotency-key": "k"}
    async with serving(engine, tmp_path) as served:
        first = await served.http.post(
            "/v1/rollouts", content=pack_request(request), headers={**PACKED, **headers}
        )
        asked = request.model_dump(mode="json", exclude_none=True)
        again = await served.http.post("/v1/rollouts", json=asked, headers=headers)
        other = await served.http.post(
            "/v1/rollouts", json={**asked, "priority": 1}, headers=headers
        )
    assert first.status_code == 200, first.text
    assert again.json() == first.json()
    assert len(engine.submitted) == 4
    assert other.json()["code"] == "idempotency_mismatch"


async def test_scores_are_the_same_in_either_form(tmp_path: Path) -> None:
    items = [{"prompt": {"token_ids": [1, 2]}, "responses": [[3, 4], [5]]}]
    request = ScoreRequest.model_validate({"items": items})
    async with serving(FakeEngine(), tmp_path) as served:
        content = pack_request(request)
        first = await served.http.post("/v1/score", content=content, headers=PACKED)
        second = await served.http.post("/v1/score", json={"items": items})
    assert first.status_code == 200 and first.json() == second.json()


async def test_packed_and_json_requests_are_refused_for_the_same_reason(tmp_path: Path) -> None:
    wrong = {"groups": [{"prompt": {"token_ids": [1, -2]}}], "n": 1}
    offsets = {"token_ids": np.array([1, -2], np.int32)}
    too_large = {"token_ids": np.array([1, 2**31 - 1], np.int32)}
    async with serving(FakeEngine(), tmp_path) as served:
        as_json = await served.http.post("/v1/rollouts", json=wrong)
        document = {"groups": [{"prompt": {"token_ids": 0}}], "n": 1}
        body = packed(document, **offsets)
        as_packed = await served.http.post("/v1/rollouts", content=body, headers=PACKED)
        ids = {**PROMPT, "groups": [{"prompt": {"token_ids": [1, 2**31 - 1]}}]}
        beyond = await served.http.post("/v1/rollouts", json=ids)
        body = packed(**too_large)
        packed_beyond = await served.http.post("/v1/rollouts", content=body, headers=PACKED)
    assert as_json.json()["errors"] == as_packed.json()["errors"]
    assert as_packed.json()["errors"][0]["location"] == "groups.0.prompt.token_ids.1"
    assert beyond.json()["detail"] == packed_beyond.json()["detail"]
    assert (beyond.status_code, packed_beyond.status_code) == (422, 422)


def file_of(**tensors: Any) -> bytes:
    data: bytes = save(tensors)
    return data


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        pytest.param(b"", 422, "invalid_request", id="empty"),
        pytest.param(b"\x00" * 8, 422, "invalid_request", id="no header"),
        pytest.param(b"\xff" * 64, 422, "invalid_request", id="header of 2^64 bytes"),
        pytest.param(b"{}" + b" " * 62, 422, "invalid_request", id="JSON"),
        pytest.param((2000).to_bytes(8, "little") + b"{}", 422, "invalid_request", id="cut header"),
        pytest.param(packed()[:-4], 422, "invalid_request", id="cut tensor"),
        pytest.param(packed() + b"more", 422, "invalid_request", id="bytes behind"),
        pytest.param(
            changed("token_ids", data_offsets=[0, 8]), 422, "invalid_request", id="overlap"
        ),
        pytest.param(changed("token_ids", shape=[2**60]), 422, "invalid_request", id="huge shape"),
        pytest.param(changed("token_ids", shape=[1, 2]), 422, "invalid_request", id="two axes"),
        pytest.param(changed("token_ids", dtype="F32"), 422, "invalid_request", id="other dtype"),
        pytest.param(
            changed("token_ids", dtype="BF16"), 422, "invalid_request", id="no numpy dtype"
        ),
        pytest.param(changed("token_ids", dtype=7), 422, "invalid_request", id="dtype of no type"),
        pytest.param(with_header(lambda _: []), 422, "invalid_request", id="header is a list"),
        pytest.param(
            with_header(lambda header: {**header, "__metadata__": 1}),
            422,
            "invalid_request",
            id="metadata is a number",
        ),
        pytest.param(file_of(x=np.zeros(1)), 422, "invalid_request", id="no metadata"),
        pytest.param(packed(more=np.zeros(1)), 422, "invalid_request", id="unknown tensor"),
        pytest.param(packed("{" + " " * 100), 400, "invalid_json", id="document is no JSON"),
        pytest.param(packed("[" * 5000), 400, "invalid_json", id="deep document"),
        pytest.param(packed([]), 422, "invalid_request", id="document is a list"),
        pytest.param(packed("{" + '"x":1,' * 9000), 413, "body_too_large", id="large document"),
        pytest.param(packed(token_ids=None), 422, "invalid_request", id="no token ids"),
        pytest.param(
            packed(token_ids=np.array([1, 2])), 422, "invalid_request", id="int64 token ids"
        ),
        *(
            pytest.param(
                packed(**{"token_ids.offsets": offsets}), 422, "invalid_request", id=str(offsets)
            )
            for offsets in (
                None,
                np.array([], np.int64),
                np.array([0]),
                np.array([0, 1]),
                np.array([1, 2]),
                np.array([0, 3]),
                np.array([0, 3, 2]),
                np.array([0, -1, 2]),
                np.array([[0, 2]]),
                np.array([0.0, 2.0]),
            )
        ),
        *(
            pytest.param(
                packed({**PROMPT, "groups": [{"prompt": {"token_ids": ids}} for ids in indices]}),
                422,
                "invalid_request",
                id=f"lists {indices}",
            )
            for indices in ([1], [-1], [0, 0], ["0"], [True], [0.5], [2**70], [[1]])
        ),
    ],
)
async def test_malformed_packed_requests_are_problems(
    tmp_path: Path, content: bytes, status: int, code: str
) -> None:
    async with serving(FakeEngine(), tmp_path, limits={"max_json_bytes": 2**14}) as served:
        answer = await served.http.post("/v1/rollouts", content=content, headers=PACKED)
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
        answer = await served.http.post("/v1/rollouts", content=packed(), headers=PACKED)
        assert answer.status_code == 200, answer.text


async def test_packed_requests_may_exceed_the_limit_of_json(tmp_path: Path) -> None:
    engine = FakeEngine(max_context_tokens=2**15)
    ids = [1] * 20_000
    request = rollout(continue_from=None, groups=[{"prompt": {"token_ids": ids}}])
    limits = {"max_json_bytes": 2**14, "max_body_bytes": 2**17}
    async with serving(engine, tmp_path, limits=limits) as served:
        content = pack_request(request)
        accepted = await served.http.post("/v1/rollouts", content=content, headers=PACKED)
        refused = await served.http.post("/v1/rollouts", json=request.model_dump(mode="json"))
        large = rollout(continue_from=None, groups=[{"prompt": {"token_ids": ids}}] * 2)
        content = pack_request(large)
        too_large = await served.http.post("/v1/rollouts", content=content, headers=PACKED)
    assert accepted.json()["groups"][0]["num_prompt_tokens"] == len(ids)
    assert refused.status_code == 413 and PACKED_MEDIA_TYPE in refused.json()["detail"]
    assert too_large.status_code == 413


@pytest.mark.parametrize("comma", [b",", rb"\u002c"])
async def test_packed_document_with_too_many_values_is_refused(
    tmp_path: Path, comma: bytes
) -> None:
    values = (b"1" + comma) * MAX_JSON_VALUES
    header = rb'{"__metadata__":{"request":"{\"x\":[' + values + b'1]}"}}'
    async with serving(FakeEngine(), tmp_path) as served:
        content = len(header).to_bytes(8, "little") + header
        answer = await served.http.post("/v1/rollouts", content=content, headers=PACKED)
    assert answer.status_code == 413 and "more than 524,288 values" in answer.json()["detail"]


async def test_other_routes_do_not_take_packed_bodies(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.post("/v1/sessions", content=packed(), headers=PACKED)
    assert answer.json()["code"] == "unsupported_media_type"
