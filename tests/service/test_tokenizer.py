"""Tokenization of text prompts: bounded beforehand, and fair between keys."""

import asyncio
import threading
from collections import UserDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from coppice.wire.rollouts import Prompt
from engine.protocol.text import DEFAULT_SAMPLING
from engine.types.chat import ChatRequest
from service.errors import PromptTooLong, QuotaExceeded
from service.log_context import key_name
from service.rollouts.tokenizer import Tokenizer
from tests.fake_engine import FakeEngine
from tests.serving import serving


class SlowTokenizer(FakeEngine):
    """Blocks in the tokenizer until `go` is set; `seen` lists texts and responses in order."""

    def __init__(self) -> None:
        super().__init__(max_context_tokens=10**9)
        self.go = threading.Event()
        self.seen: list[str] = []

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert self.go.wait(30)
        self.seen.append(text[:2])
        return [1]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.seen.append("response")
        return ""


def tokenized(prompts: Tokenizer, key: str, text: str) -> asyncio.Task[list[int]]:
    async def work() -> list[int]:
        key_name.set(key)
        [token_ids] = await prompts.all_token_ids([Prompt(text=text)])
        return token_ids

    return asyncio.create_task(work())


async def test_text_that_cannot_fit_is_refused_before_tokenization() -> None:
    engine = SlowTokenizer()
    engine.max_context_tokens = 100
    with pytest.raises(PromptTooLong, match="101 characters"):
        await Tokenizer(engine).all_token_ids([Prompt(text="a" * 101)])
    assert engine.seen == []


async def test_keys_alternate_and_responses_do_not_queue_behind_prompts() -> None:
    engine = SlowTokenizer()
    prompts = Tokenizer(engine)
    many = [tokenized(prompts, "one", f"{number:02}") for number in range(10)]
    await asyncio.sleep(0)
    other = tokenized(prompts, "another", "xx")
    await asyncio.sleep(0)
    response = asyncio.create_task(prompts.response_text([1], None, DEFAULT_SAMPLING))
    await asyncio.sleep(0)
    engine.go.set()
    await asyncio.gather(*many, other, response)
    assert engine.seen[:4] == ["00", "xx", "response", "01"]


async def test_sessions_of_a_key_share_its_turns() -> None:
    engine = SlowTokenizer()
    prompts = Tokenizer(engine)
    agents = [tokenized(prompts, f"one/{number}", f"{number}a") for number in range(6)]
    again = tokenized(prompts, "one/1", "1b")
    await asyncio.sleep(0)
    other = [tokenized(prompts, "another", text) for text in ("xx", "yy")]
    await asyncio.sleep(0)
    engine.go.set()
    await asyncio.gather(*agents, again, *other)
    assert engine.seen == ["0a", "xx", "1a", "yy", "2a", "3a", "4a", "5a", "1b"]


async def test_text_of_a_cancelled_caller_is_not_tokenized() -> None:
    engine = SlowTokenizer()
    prompts = Tokenizer(engine)
    tasks = [tokenized(prompts, "one", f"{number:02}") for number in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    engine.go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert engine.seen == ["00", "02"]


async def test_disconnected_caller_leaves_no_queued_text(tmp_path: Path) -> None:
    engine = SlowTokenizer()
    async with serving(engine, tmp_path) as served:
        sampling = {"max_tokens": 1}
        bodies = [
            {"groups": [{"prompt": {"text": f"{number:02}"}}], "sampling": sampling}
            for number in range(2)
        ]
        asked = [asyncio.create_task(served.http.post("/v1/rollouts", json=b)) for b in bodies]
        await asyncio.sleep(0.3)
        asked[1].cancel()
        await asyncio.sleep(0.3)
        engine.go.set()
        assert (await asked[0]).status_code == 200
        await asyncio.sleep(0.1)
        assert engine.seen[0] == "00" and "01" not in engine.seen


async def test_options_of_the_chat_template_count_toward_the_limit() -> None:
    engine = SlowTokenizer()
    prompts = Tokenizer(engine)
    first = tokenized(prompts, "one", "aa")
    await asyncio.sleep(0)
    large = ChatRequest(messages=[], template_options={"x": ["a" * 2**20] * 65})
    second = tokenized(prompts, "another", "bb")
    await asyncio.sleep(0)
    key_name.set("another")
    with pytest.raises(QuotaExceeded):
        await prompts.rendered(large)
    engine.go.set()
    await asyncio.gather(first, second)


class WatchedMessage(UserDict[str, object]):
    """A message that records the threads that iterate over it."""

    def __init__(self, **fields: object) -> None:
        self.threads = set[int]()
        super().__init__(fields)

    def __iter__(self) -> Iterator[str]:
        self.threads.add(threading.get_ident())
        return super().__iter__()


async def test_chat_request_is_measured_outside_the_event_loop() -> None:
    prompts, message = Tokenizer(FakeEngine()), WatchedMessage(role="user", content="a")
    assert await prompts.rendered(ChatRequest(messages=[message])) == [97]
    assert message.threads
    assert threading.get_ident() not in message.threads
