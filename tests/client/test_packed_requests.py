"""Large requests of the client are packed, and parsed to the same request."""

import json

import pytest
from pydantic import BaseModel
from pydantic_core import from_json

from coppice.transport.messages import JSON, MAX_JSON_BYTES, HttpRequest, json_request
from coppice.wire.packed.requests import PACKED_MEDIA_TYPE, pack_request, unpack_request
from coppice.wire.rollouts import RolloutRequest
from coppice.wire.score import ScoreRequest
from tests.service.test_bodies import bodies_of
from tests.service.test_bodies import sent as received
from tests.service.test_packed_requests import REQUEST


def unpacked(data: bytes, model: type[BaseModel]) -> BaseModel:
    document, lists = unpack_request(data)
    request = model.model_validate(from_json(document), context=lists)
    lists.check_taken()
    return request


def sent(request: BaseModel, *, is_packable: bool = True) -> HttpRequest:
    return json_request("POST", "/v1/rollouts", request, is_packable=is_packable)


def test_packed_request_is_the_same_request() -> None:
    request = RolloutRequest.model_validate(REQUEST)
    assert unpacked(pack_request(request), RolloutRequest) == request
    assert json.loads(request.model_dump_json(exclude_none=True))["groups"][0]["prompt"] == {
        "token_ids": [1, 2, 3]
    }


@pytest.mark.parametrize("is_packable", [True, False])
def test_request_is_packed_above_a_size_if_the_route_accepts_it(is_packable: bool) -> None:
    small = RolloutRequest.model_validate(REQUEST)
    ids = [123456] * (MAX_JSON_BYTES // 7 + 1)
    large = small.model_copy(
        update={
            "groups": RolloutRequest.model_validate(
                {"groups": [{"prompt": {"token_ids": ids}}]}
            ).groups
        }
    )
    assert sent(small, is_packable=is_packable).headers["Content-Type"] == "application/json"
    request = sent(large, is_packable=is_packable)
    assert (request.headers["Content-Type"] == PACKED_MEDIA_TYPE) == is_packable
    assert isinstance(request.body, bytes)
    if is_packable:
        assert len(request.body) < 0.7 * MAX_JSON_BYTES
        assert unpacked(request.body, RolloutRequest) == large


@pytest.mark.parametrize(
    ("num_tokens", "media_type"), [(520_000, JSON), (530_000, PACKED_MEDIA_TYPE)]
)
async def test_server_accepts_any_number_of_token_ids(num_tokens: int, media_type: str) -> None:
    """Requests are packed before their JSON has more values than the server parses."""
    item = {"prompt": {"text": "a"}, "responses": [[1] * num_tokens]}
    request = ScoreRequest.model_validate({"items": [item]})
    call = sent(request)
    assert call.headers["Content-Type"] == media_type and isinstance(call.body, bytes)
    assert await bodies_of().read_packable(received(call.body, media_type), ScoreRequest) == request
