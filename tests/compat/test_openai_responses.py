"""OpenAI's own released client against the Responses API of a server on a socket."""

from pathlib import Path
from typing import Any

import openai
import pytest

from service.compat import response_store
from service.compat.response_store import (
    KEEP_SECONDS,
    ResponseName,
    ResponseStore,
    StoredResponse,
)
from tests.compat.test_openai_client import client
from tests.compat.third_party import foreign
from tests.service.keyfile import bearer, write_keys
from tests.service.sessions.agents import training

PATH = "/v1/responses"
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
BODY: dict[str, Any] = {"model": "fake", "input": "abc", "max_output_tokens": 2}
CREATE: Any = BODY


async def test_response(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        answer = await speaker.responses.create(
            **CREATE, metadata={"a": "b"}, extra_body={"return_weight_versions": True}
        )
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status) == ("response", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "\x03\x04"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 2)
    assert answer.metadata == {"a": "b"} and answer.model_extra is not None
    assert answer.model_extra["weight_versions"] == [{"version": "v0", "start": 0, "end": 2}]


async def test_helper_of_the_client_accumulates_the_stream(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.finish = "stop"
        each: list[Any] = [{}, {"tools": [TOOL]}]
        for fields in each:
            whole = await speaker.responses.create(**CREATE, **fields)
            async with speaker.responses.stream(**CREATE, **fields) as stream:
                final = await stream.get_final_response()
            assert [item.type for item in final.output] == [item.type for item in whole.output]
            assert final.output_text == whole.output_text
    assert final.output[-1].type == "function_call"


async def test_conversation_continues_from_a_stored_response(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        first = await speaker.responses.create(**CREATE)
        second = await speaker.responses.create(
            **{**CREATE, "input": "d"}, previous_response_id=first.id
        )
        third = await speaker.responses.create(
            **{**CREATE, "input": "e"}, previous_response_id=second.id, stream=True
        )
        last: Any = [event async for event in third][-1]
        prompts = [bytes(sample.prompt_token_ids) for sample in served.engine.submitted]
        assert prompts == [b"abc", b"abc\x03\x04d", b"abc\x03\x04d\x06\x07e"]
        stored = await speaker.responses.retrieve(first.id)
        assert stored.output_text == first.output_text
        assert (await speaker.responses.retrieve(last.response.id)).output_text == "\t\n"
        await speaker.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await speaker.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await speaker.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            await speaker.responses.create(**CREATE, previous_response_id=first.id)


async def test_response_is_not_stored_if_not_wanted(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        answer = await speaker.responses.create(**CREATE, store=False)
        with pytest.raises(openai.NotFoundError):
            await speaker.responses.retrieve(answer.id)


async def test_id_of_a_response_is_chosen_by_the_server(tmp_path: Path) -> None:
    """A caller's id would replace another response that is stored."""
    async with foreign(tmp_path) as served:
        ids = {(await served.post(PATH, {**BODY, "request_id": "resp_a"}))["id"] for _ in range(2)}
    assert len(ids) == 2 and "resp_a" not in ids


async def test_stored_response_is_private_to_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secrets = write_keys(file, one="rollout", two="rollout")
    async with foreign(tmp_path, server={"keys_file": file}) as served:
        answer = await served.post(PATH, BODY, headers=bearer(secrets["one"]))
        path = f"{PATH}/{answer['id']}"
        for secret, status in ((secrets["one"], 200), (secrets["two"], 404)):
            found = await served.http.get(path, headers=bearer(secret))
            assert found.status_code == status
        body = {**BODY, "previous_response_id": answer["id"]}
        refused = await served.http.post(PATH, json=body, headers=bearer(secrets["two"]))
        assert refused.status_code == 404


def stored(num_bytes: int) -> StoredResponse:
    return StoredResponse(response=b" " * (num_bytes - 1), messages=b" ")


def name(owner: str, response_id: str, *, session: str = "") -> ResponseName:
    return ResponseName(owner=owner, scope=owner + session, id=response_id)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_OWNER_BYTES", 10)
    monkeypatch.setattr(response_store, "MAX_BYTES", 80)


@pytest.mark.usefixtures("limits")
def test_store_is_bounded_per_key_in_total_and_in_time() -> None:
    now = [0.0]
    store = ResponseStore(lambda: now[0])
    store.put(name("a", "large"), stored(11))
    assert store.get(name("a", "large")) is None
    store.put(name("a", "1"), stored(6))
    store.put(name("b", "1"), stored(1))
    store.put(name("a", "2"), stored(5))
    assert store.get(name("a", "1")) is None
    assert store.get(name("a", "2")) and store.get(name("b", "1"))
    now[0] = KEEP_SECONDS
    assert store.get(name("a", "2")) is None
    for owner in range(9):
        store.put(name(f"{owner}", "1"), stored(10))
    assert store.get(name("0", "1")) is None
    assert store.get(name("1", "1")) is not None


@pytest.mark.usefixtures("limits")
def test_sessions_of_a_key_share_its_limit_but_not_their_responses() -> None:
    store = ResponseStore()
    store.put(name("b", "1"), stored(10))
    for session in range(20):
        store.put(name("a", f"{session}", session=f"/{session}"), stored(10))
    assert store.get(name("b", "1")) is not None
    assert store.get(name("a", "18", session="/18")) is None
    assert store.get(name("a", "19", session="/19")) is not None
    assert store.get(name("a", "19", session="/18")) is None
    assert store.get(name("a", "19")) is None


async def test_response_of_a_session_counts_for_the_owner_of_the_session(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        one, other = await trainer.create(n=2, sampling={"max_tokens": 3})
        made = await one.post(PATH, {"input": "abc"})
        path = f"{PATH}/{made.json()['id']}"
        found = await one.http.get(one.url + path, headers=bearer(one.key))
        assert found.json() == made.json()
        assert (
            await other.http.get(other.url + path, headers=bearer(other.key))
        ).status_code == 404
        assert (await other.http.get(trainer.served.url + path)).status_code == 404
        store: ResponseStore = trainer.served.app.state.compat.state.responses
        own = ResponseName(owner="local", scope=f"local/{one.id}", id=made.json()["id"])
        assert store.get(own) is not None
