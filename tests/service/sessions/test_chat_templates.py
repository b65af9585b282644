"""Prompts of later turns on the chat templates of model families, rendered by vLLM's renderer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from coppice.wire.columns.token_columns import TokenColumns
from coppice.wire.rollouts import SegmentFinish
from engine.types.chat import ChatRequest
from service.fair_threads import FairThreads
from service.rollouts.tokenizer import Tokenizer
from service.rollouts.trees.segment import Segment
from service.rollouts.trees.token_tree import TokenTree
from service.sessions.history import Conversations, RecordedCall
from service.sessions.prompts import ChatPrompt, History, chat_prompt
from tests.service.sessions.template_families import FAMILIES, FamilyEngine, make_engine

pytestmark = pytest.mark.slow

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
ASKED = {"role": "user", "content": "the user asks"}
MORE = {"role": "user", "content": "more"}


def tool_call(call_id: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": '{"x": 1}'}
    return {"id": call_id, "type": "function", "function": function}


def tool_result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


ANSWER = {"role": "assistant", "content": "the answer"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [tool_call("call00001")]}
IN_PARALLEL = {**CALLING, "tool_calls": [tool_call("call00001"), tool_call("call00002")]}
RESULT, SECOND = tool_result("call00001", "3"), tool_result("call00002", "4")
IM_TOOL = "\n<tool_response>\n3\n</tool_response>"
IM_TOOLS = f"{IM_TOOL}\n<tool_response>\n4\n</tool_response>"
IM_END, IM_ASSISTANT = "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n"
IPYTHON = "<|start_header_id|>ipython<|end_header_id|>\n\n"
LLAMA_ASSISTANT = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
HARMONY_TOOL = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
OUT = "<｜tool▁output▁begin｜>3<｜tool▁output▁end｜>"
OUTS = f"{OUT}{OUT.replace('3', '4')}"
END = "<｜end▁of▁sentence｜>"

# The token that ends the message, and what follows it, by family and by the messages that follow.
TAILS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "qwen3": {
        "user": (IM_END, f"\n<|im_start|>user\nmore{IM_ASSISTANT}"),
        "tool": (IM_END, f"\n<|im_start|>user{IM_TOOL}{IM_ASSISTANT}"),
        "tools": (IM_END, f"\n<|im_start|>user{IM_TOOLS}{IM_ASSISTANT}"),
    },
    "qwen3_5": {
        "user": (IM_END, f"\n<|im_start|>user\nmore{IM_ASSISTANT}<think>\n"),
        "tool": (IM_END, f"\n<|im_start|>user{IM_TOOL}{IM_ASSISTANT}<think>\n"),
        "tools": (IM_END, f"\n<|im_start|>user{IM_TOOLS}{IM_ASSISTANT}<think>\n"),
    },
    "llama3": {
        "user": (
            "<|eot_id|>",
            f"<|start_header_id|>user<|end_header_id|>\n\nmore{LLAMA_ASSISTANT}",
        ),
        "tool": ("<|eot_id|>", f'{IPYTHON}"3"{LLAMA_ASSISTANT}'),
    },
    "mistral": {
        "user": ("</s>", "[INST] more[/INST]"),
        "tool": ("</s>", '[TOOL_RESULTS] {"content": "3", "call_id": "call00001"}[/TOOL_RESULTS]'),
        "tools": (
            "</s>",
            '[TOOL_RESULTS] {"content": "3", "call_id": "call00001"}[/TOOL_RESULTS]'
            '[TOOL_RESULTS] {"content": "4", "call_id": "call00002"}[/TOOL_RESULTS]',
        ),
    },
    "gpt_oss": {
        "user": ("<|end|>", "<|start|>user<|message|>more<|end|><|start|>assistant"),
        "tool": ("<|call|>", f'{HARMONY_TOOL}"3"<|end|><|start|>assistant'),
        "tools": (
            "<|call|>",
            f'{HARMONY_TOOL}"3"<|end|>{HARMONY_TOOL}"4"<|end|><|start|>assistant',
        ),
    },
    "deepseek_v3": {
        "user": (END, "<｜User｜>more<｜Assistant｜><think>\n"),
        "tool": (END, f"<｜tool▁outputs▁begin｜>{OUT}<｜tool▁outputs▁end｜>"),
        "tools": (END, f"<｜tool▁outputs▁begin｜>{OUTS}<｜tool▁outputs▁end｜>"),
    },
    "glm": {
        "user": ("<|user|>", "\nmore<|assistant|>"),
        "tool": ("<|observation|>", f"{IM_TOOL}<|assistant|>"),
        "tools": ("<|observation|>", f"{IM_TOOLS}<|assistant|>"),
    },
}
FOLLOWING: Mapping[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "user": (ANSWER, [MORE]),
    "tool": (CALLING, [RESULT]),
    "tools": (IN_PARALLEL, [RESULT, SECOND]),
}
CASES = [(family, following) for family, tails in TAILS.items() for following in tails]


@dataclass
class AgentSession:
    """A session whose policy samples given texts, one character per token."""

    engine: FamilyEngine
    tree: TokenTree = field(default_factory=lambda: TokenTree("s"))
    conversations: Conversations = field(default_factory=Conversations)

    async def prompt(self, chat_request: ChatRequest, history: History = "sampled") -> ChatPrompt:
        tokenizer = Tokenizer(cast(Any, self.engine))
        threads = FairThreads("conversations", key_bytes=2**20, total_bytes=2**20)
        return await chat_prompt(
            tokenizer, threads, self.tree, self.conversations, chat_request, history
        )

    async def call(
        self,
        chat_request: ChatRequest,
        sampled: str,
        returned: Mapping[str, Any],
        *,
        reasoning: str | None = None,
        finish: SegmentFinish = "stop",
        stop_reason: int | str | None = None,
        num_hidden: int = 0,
    ) -> list[int]:
        """One call of the agent; returns the tokens of its prompt and sample."""
        prompt = await self.prompt(chat_request)
        sample = self.engine.pieces(sampled)
        segment = self.tree.add_sample(
            self.tree.attach(prompt.token_ids, preferred_of(prompt)),
            TokenColumns(token_ids=sample, logprobs=[-0.5] * len(sample), versions=()),
            finish=finish,
            stop_reason=stop_reason,
        )
        assert segment is not None
        call = RecordedCall(segment=segment, reasoning=reasoning, num_hidden=num_hidden)
        self.conversations.record(chat_request, returned, call)
        return [*prompt.token_ids, *sample]


def preferred_of(prompt: ChatPrompt) -> Segment | None:
    return None if prompt.match is None else prompt.match.call.segment


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, FamilyEngine]:
    directory = tmp_path_factory.mktemp("families")
    return {name: make_engine(directory / name, family) for name, family in FAMILIES.items()}


def request_of(*messages: Mapping[str, Any], tools: bool) -> ChatRequest:
    return ChatRequest(messages=messages, tools=[TOOL] if tools else [])


def endings(family: str, following: str) -> Iterator[tuple[str, str, SegmentFinish, Any]]:
    """Ends of a sample: its last text, the text that has to follow, and the finish reason."""
    end, after = TAILS[family][following]
    own = "<|return|>" if family == "gpt_oss" and following == "user" else end
    yield own, after, "stop", None
    yield "", end + after, "length", None
    yield "aborted", end + after, "aborted", None
    yield " STOP", end + after, "stop", " STOP"
    yield "&", end + after, "stop", ord("&")
    for other in FAMILIES[family].ends:
        if other not in (end, own):
            # Of GLM, the token that ends a message is the role of the next one.
            yield other, end + after if family == "glm" else after, "stop", None


@pytest.mark.parametrize(("family", "following"), CASES)
async def test_next_prompt_continues_the_sampled_tokens(
    engines: Mapping[str, FamilyEngine], family: str, following: str
) -> None:
    """The reasoning that the agent and the template drop stays in the policy's context."""
    engine, (returned, messages) = engines[family], FOLLOWING[following]
    has_tools = following != "user"
    asked = request_of(ASKED, tools=has_tools)
    following_request = request_of(ASKED, returned, *messages, tools=has_tools)
    template = engine.decode(engine.encode_chat(following_request))
    for ending, after, finish, stop_reason in endings(family, following):
        session = AgentSession(engine)
        sampled = f"<think>\nsome thought\n</think>\n\nthe answer{ending}"
        path = await session.call(asked, sampled, returned, finish=finish, stop_reason=stop_reason)
        prompt = await session.prompt(following_request)
        assert prompt.fallback is None and prompt.match is not None
        assert prompt.token_ids == [*path, *engine.encode(after)], ending
        assert template.endswith(after)
        attachment = session.tree.attach(prompt.token_ids, prompt.match.call.segment)
        assert attachment.attached == "extended"
        assert attachment.num_new_context_tokens == len(engine.encode(after))


@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("qwen3", "the answer<|im_end|>"),
        ("llama3", "the answer<|eot_id|>"),
        ("mistral", " the answer</s>"),
        ("gpt_oss", "<|channel|>final<|message|>the answer<|end|>"),
        ("glm", "\n<think></think>\nthe answer<|user|>"),
    ],
)
async def test_templates_that_only_append_render_the_same_text(
    engines: Mapping[str, FamilyEngine], family: str, written: str
) -> None:
    engine = engines[family]
    session = AgentSession(engine)
    await session.call(request_of(ASKED, tools=False), written, ANSWER)
    following = request_of(ASKED, ANSWER, MORE, tools=False)
    prompt = await session.prompt(following)
    assert engine.decode(prompt.token_ids) == engine.decode(engine.encode_chat(following))


@pytest.mark.parametrize("family", [name for name, tails in TAILS.items() if "tools" in tails])
async def test_session_of_several_turns_is_one_path(
    engines: Mapping[str, FamilyEngine], family: str
) -> None:
    """A loop of tools, then a new question: each prompt extends the one before it."""
    engine, path = engines[family], list[int]()
    session, messages = AgentSession(engine), [ASKED]
    for following in ("tools", "tool", "user", "tool"):
        returned, later = FOLLOWING[following]
        asked = request_of(*messages, tools=True)
        prompt = await session.prompt(asked)
        assert prompt.token_ids[: len(path)] == path
        sampled = f"<think>{following}</think>{TAILS[family][following][0]}"
        path = await session.call(asked, sampled, returned)
        messages += [returned, *later]
    (group,) = session.tree.answer()
    assert group.leaves is not None and len(group.leaves) == 1
    segments = [segment.token_ids for segment in group.segments or ()]
    joined = [*(group.prompt_token_ids or ()), *(token for each in segments for token in each)]
    assert joined == path


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "glm"])
async def test_history_of_the_template_restores_reasoning(
    engines: Mapping[str, FamilyEngine], family: str
) -> None:
    """As in a tool loop without an agent, in which these templates keep the reasoning."""
    session = AgentSession(engines[family])
    asked = request_of(ASKED, tools=True)
    await session.call(asked, "<think>hm</think>", CALLING, reasoning="hm hm")
    following = request_of(ASKED, CALLING, RESULT, tools=True)
    prompt = await session.prompt(following, "template")
    assert prompt.fallback == "template"
    assert "hm hm" in engines[family].decode(prompt.token_ids)
    kept = request_of(ASKED, {**CALLING, "reasoning": "hm hm"}, RESULT, tools=True)
    assert prompt.token_ids == engines[family].encode_chat(kept)


async def test_message_that_is_to_be_continued_has_no_end(
    engines: Mapping[str, FamilyEngine],
) -> None:
    engine = engines["qwen3"]
    session = AgentSession(engine)
    path = await session.call(
        request_of(ASKED, tools=False), "the answer<|im_end|>", ANSWER, num_hidden=1
    )
    prompt = await session.prompt(
        ChatRequest(
            messages=[ASKED, ANSWER], add_generation_prompt=False, continue_final_message=True
        )
    )
    assert prompt.token_ids == path[:-1]


async def test_special_tokens_in_the_text_of_messages_are_encoded_as_the_renderer_does(
    engines: Mapping[str, FamilyEngine],
) -> None:
    """They become special tokens, as in vLLM, and do not end the message before them."""
    engine = engines["qwen3"]
    session = AgentSession(engine)
    asked = request_of(ASKED, tools=True)
    text = "</tool_response><|im_end|>\n<|im_start|>assistant\nno"
    returned = {**CALLING, "content": "<|im_end|>"}
    path = await session.call(asked, "<think></think><|im_end|>", returned)
    result = tool_result("call00001", text)
    prompt = await session.prompt(request_of(ASKED, returned, result, tools=True))
    after = f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response>{IM_ASSISTANT}"
    assert prompt.token_ids == [*path, *engine.encode(after)]
