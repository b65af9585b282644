"""Streams of responses that call tools: the joined parts are the message of the whole response."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from coppice.wire.rollouts import SampleAnswer
from engine.protocol.text import DEFAULT_SAMPLING, ResponseStream
from engine.requests.response_parsers import STREAMING_TOOL_PARSERS
from engine.requests.response_stream import ParsedStream
from engine.types.chat import ChatRequest, ChatResponse, ToolCall, ToolCallPart
from service.compat.anthropic.stream import _BlockEvents, content_blocks
from service.compat.chat.streamed_message import StreamedMessage, with_whole_calls
from service.compat.responses.events import OutputItems
from service.compat.sample_stream import SamplePart
from tests.engine.chats import TemplateChat, make_chat

Arguments = dict[str, Any]
Format = Callable[[str, Arguments], str]

PROPERTIES = {
    "text": {"type": "string"},
    "number": {"type": "integer"},
    "list": {"type": "array", "items": {"type": "integer"}},
    "flag": {"type": "boolean"},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("add", "search_files")
]
REQUEST = ChatRequest(messages=[{"role": "user", "content": "go"}], tools=TOOLS)
TEXTS = ('a "quoted" word', "two\nlines", "é€ 好", "{}[]", "<b>", "", "1", "true", "a=b, c(d)")


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def hermes(name: str, arguments: Arguments) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def hermes_compact(name: str, arguments: Arguments) -> str:
    return f"<tool_call>{compact({'name': name, 'arguments': arguments})}</tool_call>"


def qwen3_xml(name: str, arguments: Arguments) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def glm45(name: str, arguments: Arguments) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


FORMATS: list[tuple[str, Format, str]] = [
    ("hermes", hermes, "\n"),
    ("hermes", hermes_compact, ""),
    ("qwen3_json", hermes, "\n"),
    ("qwen3_coder", qwen3_xml, "\n"),
    ("qwen3_xml", qwen3_xml, "\n"),
    ("glm45", glm45, "\n"),
    ("glm47", glm45, ""),
]


class InlineTokenizer:
    """Runs a stream without a thread."""

    async def add(self, stream: ResponseStream, token_ids: Sequence[int]) -> ChatResponse:
        return stream.add(token_ids)

    async def finish(
        self, stream: ResponseStream, token_ids: Sequence[int], stop_reason: int | str | None
    ) -> ChatResponse:
        return stream.finish(token_ids, stop_reason)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TemplateChat]]:
    yield {
        name: make_chat(tmp_path_factory.mktemp("chat"), tool_parser=name, reasoning_parser="qwen3")
        for name in STREAMING_TOOL_PARSERS
    }


def arguments_of(rng: random.Random) -> Arguments:
    given = {
        "text": rng.choice(TEXTS) * rng.choice((1, 1, 40)),
        "number": rng.randrange(-9, 10**6),
        "list": [rng.randrange(99) for _ in range(rng.randrange(4))],
        "flag": rng.random() < 0.5,
    }
    return {key: given[key] for key in rng.sample(sorted(given), rng.randrange(5))}


def response_text(rng: random.Random, to_text: Format, between: str) -> str:
    given = [
        (rng.choice(("add", "search_files")), arguments_of(rng)) for _ in range(rng.randrange(4))
    ]
    before = rng.choice(("", "I call a tool.\n", "ok", "ok\n\n"))
    reasoning = rng.choice(("", "<think>\nlet me see\n</think>\n\n"))
    calls = between.join(to_text(*call) for call in given)
    return reasoning + before + (calls or "no call")


def sample_parts(
    token_ids: list[int], rng: random.Random, longest: int | None = None
) -> Iterator[SamplePart]:
    sample = SampleAnswer(
        index=0, token_ids=token_ids, logprobs=[], finish_reason="stop", versions=[]
    )
    longest, start = longest or rng.choice((1, 3, 20)), 0
    while start < len(token_ids):
        end = start + rng.randint(1, longest)
        is_last = end >= len(token_ids)
        yield SamplePart(
            group=0,
            index=0,
            start=start,
            token_ids=token_ids[start:end],
            logprobs=(),
            top_logprobs=(),
            version=None,
            sample=sample if is_last else None,
        )
        start = end


async def streamed(
    chat: TemplateChat, token_ids: list[int], whole: ChatResponse, rng: random.Random
) -> list[ChatResponse]:
    stream = chat.chat.response_stream(prompt=[1], chat_request=REQUEST)
    assert stream.has_tool_calls
    tokenizer: Any = InlineTokenizer()
    message = StreamedMessage(tokenizer, stream)
    return [
        await message.next(part) if part.sample is None else await message.last(part, whole)
        for part in sample_parts(token_ids, rng)
    ]


def joined(parts: list[ChatResponse]) -> list[tuple[str | None, Any]]:
    """Name and arguments of each call."""
    names, texts = dict[int, str | None](), dict[int, str]()
    for call in (call for part in parts for call in part.tool_call_parts):
        if call.name is not None:
            assert call.index == len(names) and call.id
            names[call.index] = call.name
        texts[call.index] = texts.get(call.index, "") + call.arguments
    return [(names[index], json.loads(text)) for index, text in texts.items()]


def text_of(parts: list[ChatResponse], kind: str) -> str:
    return "".join(getattr(part, kind) or "" for part in parts)


def content_of(parts: list[ChatResponse], whole: ChatResponse) -> str:
    """Parsers keep or drop white space around content that a tool call follows."""
    text = text_of(parts, "content")
    return text.strip() if whole.tool_calls else text


def items_of(parts: list[ChatResponse], custom_tools: Sequence[str] = ()) -> list[list[Any]]:
    """Kind, text and status of the output items of the Responses API, without empty messages."""
    built = OutputItems(name="", custom_tools=frozenset(custom_tools), encrypts=False)
    events = [event for part in parts for event in built.add(part)] + built.end("completed")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == built.items
    for at, item in enumerate(done):
        deltas = [e["delta"] for e in events if "delta" in e and e["output_index"] == at]
        assert "".join(deltas) == item_text(item)
    shown = [[item["type"], value_of(item_text(item)), item["status"]] for item in done]
    return [item for item in shown if item[:2] != ["message", ""]]


def item_text(item: dict[str, Any]) -> str:
    if item["type"] in ("message", "reasoning"):
        return str(item["content"][0]["text"])
    return str(item["input" if item["type"] == "custom_tool_call" else "arguments"])


def value_of(text: str) -> Any:
    """Arguments as values, other text without the white space around it."""
    return json.loads(text) if text.startswith("{") else text.strip()


def blocks_of(parts: list[ChatResponse]) -> list[list[Any]]:
    """Kind and text of the blocks of a message of Anthropic's API, built from its events."""
    built, blocks, is_open = _BlockEvents(signature=""), list[list[Any]](), False
    for event in [*(each for part in parts for each in built._events(part)), *built.end()]:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append([block["type"], ""])
                is_open = True
            case {"type": "content_block_stop"}:
                is_open = False
            case {"index": index, "delta": delta} if delta["type"] != "signature_delta":
                assert is_open and index == len(blocks) - 1
                [text] = [value for key, value in delta.items() if key != "type"]
                blocks[-1][1] += text
    shown = [[kind, value_of(text)] for kind, text in blocks]
    return [block for block in shown if block != ["text", ""]]


def whole_blocks_of(whole: ChatResponse) -> list[list[Any]]:
    fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    found = [[block["type"], block[fields[block["type"]]]] for block in content_blocks(whole, "")]
    shown = [[kind, text.strip() if isinstance(text, str) else text] for kind, text in found]
    return [block for block in shown if block != ["text", ""]]


@pytest.mark.parametrize(("name", "to_text", "between"), FORMATS)
async def test_joined_parts_are_the_whole_message(
    chats: dict[str, TemplateChat], name: str, to_text: Format, between: str
) -> None:
    chat, num_early = chats[name], 0
    for seed in range(60):
        rng = random.Random(seed)
        text = response_text(rng, to_text, between)
        token_ids = chat.tokenizer.encode(text)
        whole = chat.chat.chat_response(token_ids, REQUEST)
        parts = await streamed(chat, token_ids, whole, rng)
        expected = [(call.name, json.loads(call.arguments)) for call in whole.tool_calls]
        assert (joined(parts), parts[-1].parsed) == (expected, True), text
        assert content_of(parts, whole) == content_of([whole], whole), text
        assert text_of(parts, "reasoning") == (whole.reasoning or ""), text
        num_early += any(part.tool_call_parts for part in parts[:-1])
        # Clients such as llama-index read the first part of a call in a chunk only.
        for part in parts:
            indexes = [call.index for call in part.tool_call_parts]
            assert len(set(indexes)) == len(indexes), text
    assert num_early > 10, "calls are sent before the end"


@pytest.mark.parametrize(("name", "to_text", "between"), FORMATS)
async def test_items_and_blocks_of_the_parts_are_those_of_the_whole_message(
    chats: dict[str, TemplateChat], name: str, to_text: Format, between: str
) -> None:
    chat = chats[name]
    for seed in range(60):
        rng = random.Random(seed)
        text = response_text(rng, to_text, between)
        token_ids = chat.tokenizer.encode(text)
        whole = chat.chat.chat_response(token_ids, REQUEST)
        parts, expected = await streamed(chat, token_ids, whole, rng), [with_whole_calls(whole)]
        assert items_of(parts) == items_of(expected), text
        assert items_of(parts, ["add"]) == items_of(expected, ["add"]), text
        assert blocks_of(parts) == whole_blocks_of(whole), text


@pytest.mark.parametrize(("name", "to_text", "between"), FORMATS)
async def test_response_that_is_cut_is_streamed_up_to_its_end(
    chats: dict[str, TemplateChat], name: str, to_text: Format, between: str
) -> None:
    """A call that is cut may be content of the whole message; what was sent cannot be withdrawn."""
    chat = chats[name]
    for seed in range(40):
        rng = random.Random(seed)
        token_ids = chat.tokenizer.encode(response_text(rng, to_text, between))
        token_ids = token_ids[: rng.randint(1, len(token_ids))]
        whole = chat.chat.chat_response(token_ids, REQUEST)
        parts = await streamed(chat, token_ids, whole, rng)
        if parts[-1].parsed:
            calls = [(call.name, json.loads(call.arguments)) for call in whole.tool_calls]
            assert joined(parts) == calls
            assert content_of(parts, whole) == content_of([whole], whole)


def test_every_streaming_parser_is_compared() -> None:
    assert {name for name, *_ in FORMATS} == STREAMING_TOOL_PARSERS


def test_long_message_is_parsed_in_growing_steps(chats: dict[str, TemplateChat]) -> None:
    class CountingParser:
        num_calls = 0

        def parse_delta(self, *_: Any, **__: Any) -> None:
            self.num_calls += 1

    parser, request = CountingParser(), ChatRequest(messages=[])
    tokenizer = chats["hermes"].tokenizer
    checked: Any = type("Request", (), {"skip_special_tokens": True, "chat": request})
    stream = ParsedStream(
        tokenizer, DEFAULT_SAMPLING, parser, checked, [], lambda *_: "", has_tool_calls=True
    )
    for _ in range(20_000):
        stream.add([5])
    assert 1_000 < parser.num_calls < 2_000


class PreparedStream:
    """A stream whose parser finds the given parts, one at each token."""

    is_parsed = has_tool_calls = True

    def __init__(self, parts: list[ChatResponse]) -> None:
        self._parts = iter(parts)

    def add(self, token_ids: Sequence[int]) -> ChatResponse:
        return next(self._parts)

    def finish(self, token_ids: Sequence[int], stop_reason: int | str | None) -> ChatResponse:
        return ChatResponse(content=None)


async def prepared(parts: list[ChatResponse], whole: ChatResponse) -> list[ChatResponse]:
    """The parts that are sent if the parser finds the given ones."""
    tokenizer: Any = InlineTokenizer()
    stream: Any = PreparedStream(parts)
    message, rng = StreamedMessage(tokenizer, stream), random.Random(0)
    *running, last = sample_parts([7] * (len(parts) + 1), rng, longest=1)
    return [*[await message.next(part) for part in running], await message.last(last, whole)]


def part_of(index: int, arguments: str, name: str | None = None) -> ChatResponse:
    call = ToolCallPart(index=index, id=name and "id", name=name, arguments=arguments)
    return ChatResponse(content=None, tool_call_parts=(call,))


async def test_part_of_an_unknown_call_is_not_sent() -> None:
    whole = ChatResponse(content=None, tool_calls=(ToolCall(id="id", name="add", arguments="{}"),))
    parts = await prepared([part_of(0, "{")], whole)
    assert items_of(parts) == items_of([with_whole_calls(whole)])
    assert parts[-1].parsed


async def test_text_after_a_sent_call_does_not_end_the_call() -> None:
    call = ToolCall(id="id", name="add", arguments='{"a": 1}')
    whole = ChatResponse(content="ok", tool_calls=(call,))
    given = [
        ChatResponse(content="ok"),
        part_of(0, '{"a"', "add"),
        ChatResponse(content="more", tool_call_parts=part_of(0, ": 1").tool_call_parts),
    ]
    parts = await prepared(given, whole)
    assert items_of(parts) == items_of([with_whole_calls(whole)])
    assert blocks_of(parts) == whole_blocks_of(whole)
    assert parts[-1].parsed


async def test_other_text_of_the_whole_message_leaves_the_sent_call_complete() -> None:
    call = ToolCall(id="id", name="add", arguments='{"a": 1}')
    whole = ChatResponse(content="more", tool_calls=(call,))
    parts = await prepared([part_of(0, '{"a"', "add")], whole)
    assert joined(parts) == [("add", {"a": 1})]
    assert (text_of(parts, "content"), parts[-1].parsed) == ("", False)
