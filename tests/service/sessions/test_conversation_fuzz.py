"""Fuzzing of agents: edits, retries, forks, compaction, aborted and concurrent calls.

Checked against a reference that compares whole conversations instead of hashes, and that knows the
tokens of each call. Each sampled token has a logprob of its own, by which it is found in the tree.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coppice.wire.columns.support import Support
from coppice.wire.columns.token_columns import TokenColumns
from coppice.wire.columns.weights_version_spans import VersionSpan
from coppice.wire.rollouts import GroupAnswer, SegmentAnswer, SegmentFinish
from engine.types.chat import ChatRequest
from service.errors import ServiceError
from service.fair_threads import FairThreads
from service.rollouts.tokenizer import Tokenizer
from service.rollouts.trees.segment import Attachment, Segment
from service.rollouts.trees.token_tree import TokenTree
from service.sessions.history import Conversations, RecordedCall
from service.sessions.prompts import ChatPrompt, History, chat_prompt
from tests.sample_sizes import num_examples
from tests.service.sessions.template_families import FAMILIES, FamilyEngine, make_engine

Message = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
MIN_SHARED_TOKENS = 24
SPECIAL = ("</s>", "[INST]", "<|im_end|>\n", "<|im_start|>", "<|end|>", "</tool_response>")
TEXTS = st.lists(
    st.sampled_from(["", " ", "\n", "the user", "a", "é", "日本", "👩‍👩‍👧", "\u202e"])
    | st.sampled_from(SPECIAL)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    max_size=4,
).map("".join)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
ARGUMENTS = st.dictionaries(st.sampled_from(["x", "y", "é"]), NUMBERS | TEXTS, max_size=2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Made:
    """A call that has ended: its conversation, the message that it returned, and its tokens.

    A call of token ids has no conversation.
    """

    request: ChatRequest | None
    returned: Message
    path: list[int]
    sample: list[int]
    logprobs: list[float]
    segment: Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Started:
    """A call that runs."""

    request: ChatRequest | None
    prompt: list[int]
    attachment: Attachment


@dataclass
class Agent:
    """An agent that makes random calls in one session, and the record of all of them."""

    engine: FamilyEngine
    data: st.DataObject
    tokenizer: Tokenizer
    matching: FairThreads
    tree: TokenTree = field(
        default_factory=lambda: TokenTree("s", min_shared_tokens=MIN_SHARED_TOKENS)
    )
    conversations: Conversations = field(default_factory=Conversations)
    threads: list[list[Message]] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    num_logprobs: int = 0
    num_ids: int = 0

    async def run(self) -> None:
        for _ in range(self.draw(st.integers(1, 8))):
            if self.made and self.draw(st.sampled_from([False, False, True])):
                self.end(self.start_with_token_ids())
                continue
            thread = self.thread()
            requests = [self.request(thread)] * self.draw(st.sampled_from([1, 1, 1, 2]))
            started = [call for each in requests if (call := await self.start(each))]
            returned = [made.returned for call in started if (made := self.end(call))]
            if returned:
                thread += self.later_messages(self.draw(st.sampled_from(returned)))

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)

    def thread(self) -> list[Message]:
        """A conversation to go on with: an earlier one, a part or an edit of it, or a new one."""
        kind = self.draw(st.sampled_from(["go on"] * 4 + ["new", "fork", "edit", "compact"]))
        if kind in ("new", "compact") or not self.threads:
            asked = {"role": "user", "content": self.draw(TEXTS)}
            system = {"role": "system", "content": "the tool answers the user"}
            self.threads.append([system, asked] if kind == "compact" else [asked])
            return self.threads[-1]
        thread = self.draw(st.sampled_from(self.threads))
        if kind == "go on":
            return cast(list[Message], thread)
        copied = [dict(message) for message in thread]
        at = self.draw(st.integers(0, len(copied) - 1))
        if kind == "fork":
            copied[at + 1 :] = [{"role": "user", "content": self.draw(TEXTS)}]
        else:
            copied[at]["content"] = self.draw(TEXTS)
        self.threads.append(copied)
        return copied

    def request(self, thread: Sequence[Message]) -> ChatRequest:
        """The conversation as a client sends it: the assistant's messages are formatted again."""
        sent = [self.reformatted(each) if each["role"] == "assistant" else each for each in thread]
        return ChatRequest(messages=sent, tools=[TOOL])

    def reformatted(self, message: Message) -> Message:
        if not self.draw(st.booleans()):
            return message
        changed = {**message, "content": f" {message['content']}\n", "refusal": None}
        calls = [_reformatted_call(call) for call in message.get("tool_calls", ())]
        return {**changed, "tool_calls": calls} if calls else changed

    def start_with_token_ids(self) -> Started:
        """A call of /v1/completions, whose prompt may end or leave a path at any token."""
        path = self.draw(st.sampled_from(self.made)).path
        cut = self.draw(st.integers(1, len(path)) | st.integers(max(1, len(path) - 4), len(path)))
        return self.attach(None, [*path[:cut], *self.engine.pieces(self.draw(TEXTS))], None)

    def attach(
        self, request: ChatRequest | None, prompt: list[int], preferred: Segment | None
    ) -> Started:
        attachment = self.tree.attach(prompt, preferred)
        assert self.tree.token_ids(attachment.parent) == prompt
        return Started(request=request, prompt=prompt, attachment=attachment)

    async def start(self, request: ChatRequest) -> Started | None:
        history: History = self.draw(st.sampled_from(["sampled", "sampled", "template"]))
        try:
            prompt = await chat_prompt(
                self.tokenizer,
                self.matching,
                self.tree,
                self.conversations,
                request,
                history,
            )
        except ServiceError:  # the template refuses the conversation
            return None
        self.check_prompt(request, prompt)
        preferred = None if prompt.match is None else prompt.match.call.segment
        return self.attach(request, prompt.token_ids, preferred)

    def check_prompt(self, request: ChatRequest, prompt: ChatPrompt) -> None:
        """Compare the prompt to the latest call whose messages the conversation begins with."""
        messages = request.messages
        for index in range(len(messages) - 1, -1, -1):
            for made in reversed(self.made):
                if made.request is None or len(made.request.messages) != index:
                    continue
                recorded = [*made.request.messages, made.returned]
                if _are_same(recorded, messages[: index + 1]):
                    return self.check_continuation(request, prompt, made, index)
        assert prompt.match is None
        assert prompt.token_ids == self.engine.encode_chat(request)

    def check_continuation(
        self, request: ChatRequest, prompt: ChatPrompt, made: Made, index: int
    ) -> None:
        assert prompt.match is not None and prompt.match.index == index
        found = next(each for each in self.made if each.segment is prompt.match.call.segment)
        assert _are_same([found.returned], [made.returned])
        if prompt.fallback is not None:
            assert prompt.token_ids == self.engine.encode_chat(request)
            return
        after = prompt.token_ids[len(found.path) :]
        assert prompt.token_ids[: len(found.path)] == found.path
        rendered = self.engine.decode(self.engine.encode_chat(request))
        assert rendered.endswith(self.engine.decode(after))

    def end(self, call: Started) -> Made | None:
        """End a call, perhaps before its first token."""
        text = self.draw(TEXTS)
        finish: SegmentFinish = self.draw(st.sampled_from(["stop", "stop", "length", "aborted"]))
        sample = self.engine.pieces(text)
        if finish == "stop":
            sample.append(self.draw(st.sampled_from(self.engine.ends)))
        if not sample:
            self.tree.detach(call.attachment)
            return None
        returned = self.message()
        logprobs = [-float(self.num_logprobs + i) for i in range(len(sample))]
        self.num_logprobs += len(sample)
        segment = self.tree.add_sample(
            call.attachment,
            TokenColumns(
                token_ids=sample,
                logprobs=logprobs,
                versions=(VersionSpan(version="1", start=0, end=len(sample)),),
                support=Support(tuple(str(each).encode() for each in logprobs), 2**20),
            ),
            finish=finish,
        )
        assert segment is not None
        if call.request is not None:
            self.conversations.record(call.request, returned, RecordedCall(segment=segment))
        made = Made(
            request=call.request,
            returned=returned,
            path=[*call.prompt, *sample],
            sample=sample,
            logprobs=logprobs,
            segment=segment,
        )
        self.made.append(made)
        return made

    def message(self) -> Message:
        """A message of a parser: any text, and up to three tool calls."""
        message = {"role": "assistant", "content": self.draw(TEXTS)}
        calls = [self.tool_call() for _ in range(self.draw(st.sampled_from([0, 0, 1, 2, 3])))]
        return {**message, "tool_calls": calls} if calls else message

    def tool_call(self) -> Message:
        self.num_ids += 1
        arguments = self.draw(ARGUMENTS.map(json.dumps) | st.sampled_from(["", "{", "[1]"]))
        function = {"name": "add", "arguments": arguments}
        return {"id": f"call{self.num_ids:05}", "type": "function", "function": function}

    def later_messages(self, returned: Message) -> list[Message]:
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": self.draw(TEXTS)}
            for call in returned.get("tool_calls", ())
        ]
        if results and self.draw(st.booleans()):
            return [returned, *results]
        return [returned, *results, {"role": "user", "content": self.draw(TEXTS)}]

    def check_tree(self) -> None:
        """Each sampled token is in the answer once, and each path is that of a call."""
        for made in self.made:
            assert self.tree.token_ids(made.segment) == made.path
        groups = self.tree.answer()
        segments = [segment for group in groups for segment in group.segments or ()]
        sampled = [segment for segment in segments if segment.sampled]
        found = [
            pair for each in sampled for pair in zip(each.token_ids, each.logprobs, strict=True)
        ]
        expected = [pair for m in self.made for pair in zip(m.sample, m.logprobs, strict=True)]
        assert sorted(found) == sorted(expected)
        assert self.tree.num_sampled_tokens == len(found)
        num_prompt = sum(group.num_prompt_tokens for group in groups)
        num_context = sum(len(each.token_ids) for each in segments if not each.sampled)
        assert self.tree.num_context_tokens == num_prompt + num_context
        paths = {tuple(made.path) for made in self.made}
        for group in groups:
            _check_group(group, paths)


def _check_group(group: GroupAnswer, paths: set[tuple[int, ...]]) -> None:
    assert group.segments is not None and group.prompt_token_ids and group.leaves
    by_id: dict[str | None, SegmentAnswer] = {}
    ends: dict[str | None, list[int]] = {None: group.prompt_token_ids}
    contexts = Counter[tuple[str | None, int]]()
    for segment in group.segments:
        assert segment.parent is None or segment.parent in by_id, "parents precede children"
        by_id[segment.id] = segment
        ends[segment.id] = [*ends[segment.parent], *segment.token_ids]
        if segment.sampled:
            assert sum(span.end - span.start for span in segment.versions) == len(segment.token_ids)
            assert segment.support is not None
            assert len(segment.support.lengths) == len(segment.token_ids)
        else:
            assert (segment.logprobs, segment.versions, segment.support) == ([], [], None)
            contexts[segment.parent, segment.token_ids[0]] += 1
    assert set(contexts.values()) <= {1}, "context is shared"
    parents = {segment.parent for segment in group.segments}
    assert set(group.leaves) == by_id.keys() - parents
    assert all(by_id[leaf].sampled and tuple(ends[leaf]) in paths for leaf in group.leaves)


def _reformatted_call(call: Mapping[str, Any]) -> Message:
    """The call with its arguments written as another JSON library writes them."""
    arguments = call["function"]["arguments"]
    try:
        values = json.loads(arguments)
    except ValueError:
        return dict(call)
    written = json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": written}}


def _are_same(some: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> bool:
    """True if two conversations are the same; all differences that are ignored are named here."""
    ids = list[tuple[Any, Any]]()
    for one, other in zip(some, others, strict=True):
        if one["role"] != other["role"]:
            return False
        if one["role"] != "assistant":
            if one["content"] != other["content"]:
                return False
            ids.append((one.get("tool_call_id"), other.get("tool_call_id")))
            continue
        calls, other_calls = one.get("tool_calls", []), other.get("tool_calls", [])
        if one["content"].strip() != other["content"].strip() or len(calls) != len(other_calls):
            return False
        for call, other_call in zip(calls, other_calls, strict=True):
            ids.append((call["id"], other_call["id"]))
            if _arguments(call) != _arguments(other_call):
                return False
    return len({a for a, _ in ids}) == len({b for _, b in ids}) == len(set(ids))


def _arguments(call: Mapping[str, Any]) -> Any:
    text = call["function"]["arguments"]
    try:
        return json.loads(text or "{}", parse_int=float)
    except ValueError:
        return text


def fuzz(engine: FamilyEngine, data: st.DataObject) -> None:
    async def run() -> None:
        tokenizer = Tokenizer(cast(Any, engine))
        matching = FairThreads("conversations", key_bytes=2**20, total_bytes=2**20)
        agent = Agent(engine, data, tokenizer, matching)
        await agent.run()
        agent.check_tree()

    asyncio.run(run())


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FamilyEngine]:
    return {}


def engine_of(
    engines: dict[str, FamilyEngine], name: str, directory: pytest.TempPathFactory
) -> FamilyEngine:
    if name not in engines:
        engines[name] = make_engine(directory.mktemp("family") / name, FAMILIES[name])
    return engines[name]


fuzzed = settings(
    deadline=None,
    max_examples=num_examples(50),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@fuzzed
@given(data=st.data())
@pytest.mark.parametrize(
    "family",
    [
        "mistral",
        *(
            pytest.param(name, marks=[pytest.mark.slow, pytest.mark.exhaustive])
            for name in ("qwen3", "qwen3_5", "gpt_oss", "deepseek_v3", "glm")
        ),
    ],
)
def test_every_sampled_token_is_kept_and_every_path_is_what_the_engine_read(
    tmp_path_factory: pytest.TempPathFactory,
    engines: dict[str, FamilyEngine],
    family: str,
    data: st.DataObject,
) -> None:
    fuzz(engine_of(engines, family, tmp_path_factory), data)
