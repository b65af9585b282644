"""A tool loop of OpenAI's client on the real engine: the tree has exactly what was sampled."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI

from coppice import AsyncRollouts
from coppice.sessions import AgentSession, SessionResult
from tests.engine.seedling import BLOCK, MODEL, reference, settings
from tests.serving import Served, serving

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TEMPLATE = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
 {{ call.function.name }}({{ call.function.arguments | tojson }})
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, 3]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS}}
CHOICE: Any = {"type": "function", "function": {"name": "add"}}
TASK: Any = [{"role": "user", "content": "Compute 12+34 with the tool. " * 4}]
WITHOUT_SPACES = {"backend": "xgrammar", "disable_any_whitespace": True}
WITH_IDS: dict[str, Any] = {"return_token_ids": True}
TOLERANCE = 1e-3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    from engine.vllm_engine import VllmEngine

    folder = tmp_path_factory.mktemp("sessions")
    model = shutil.copytree(MODEL, folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    engine = VllmEngine(settings(model, vllm_args={"structured_outputs_config": WITHOUT_SPACES}))
    async with serving(engine, folder) as served:
        yield served


class Loop:
    """An agent that calls a tool and sends the result back; records what its client received."""

    def __init__(self, agent: AsyncOpenAI) -> None:
        self.agent = agent
        self.messages = list(TASK)
        self.turns: list[tuple[list[int], list[int]]] = []

    async def call_tool(self) -> None:
        answer: Any = await self.agent.chat.completions.create(
            model="any",
            messages=self.messages,
            tools=[TOOL],
            tool_choice=CHOICE,
            extra_body=WITH_IDS,
        )
        [choice] = answer.choices
        self.turns.append((answer.prompt_token_ids, choice.token_ids))
        self.messages.append(choice.message.model_dump(include={"role", "content", "tool_calls"}))
        assert choice.message.tool_calls, choice.message.content
        for call in choice.message.tool_calls:
            result = {"role": "tool", "tool_call_id": call.id, "content": "the sum is 46"}
            self.messages.append(result)

    async def stream_text(self) -> None:
        prompt, sampled, text = list[int](), list[int](), ""
        chunks: Any = await self.agent.chat.completions.create(
            model="any", messages=self.messages, tools=[TOOL], stream=True, extra_body=WITH_IDS
        )
        async for chunk in chunks:
            prompt = getattr(chunk, "prompt_token_ids", None) or prompt
            [choice] = chunk.choices
            sampled += getattr(choice, "token_ids", None) or []
            text += choice.delta.content or ""
        self.turns.append((prompt, sampled))
        self.messages.append({"role": "assistant", "content": text})
        self.messages.append({"role": "user", "content": "again"})


async def run_loop(served: Served, session: AgentSession) -> Loop:
    async with AsyncOpenAI(base_url=session.openai_url, api_key=session.key) as agent:
        loop = Loop(agent)
        await loop.call_tool()
        await loop.stream_text()
        await loop.call_tool()
    return loop


async def test_tree_of_a_tool_loop_has_the_sampled_tokens(served: Served) -> None:
    async with AsyncRollouts(served.url) as client:
        group = await client.sessions.create(
            sampling={"max_tokens": 96, "temperature": 0.8},
            overrides=["structured_outputs", "max_tokens"],
            return_support=True,
        )
        [session] = group.sessions
        loop = await run_loop(served, session)
        result = await client.sessions.finish(session.id, reward=1.0)
    assert [turn.reason for turn in result.turns] == ["new_conversation", "extended", "extended"]
    assert [turn.attached for turn in result.turns] == ["root", "extended", "extended"]
    for turn, (prompt, sampled) in zip(result.turns, loop.turns, strict=True):
        path = _path(result, turn.segment)
        assert path == prompt + sampled
    assert all(turn.num_cached_tokens >= BLOCK for turn in result.turns[1:])
    assert result.usage.num_forwarded_tokens < 2 * result.usage.num_context_tokens


async def test_logprobs_of_a_session_are_those_of_the_model(served: Served) -> None:
    async with AsyncRollouts(served.url) as client:
        group = await client.sessions.create(
            sampling={"max_tokens": 64}, overrides=["structured_outputs"], return_support=True
        )
        [session] = group.sessions
        await run_loop(served, session)
        result = await client.sessions.finish(session.id)
    model = reference()
    [tree] = [group.tree for group in result.groups]
    assert tree is not None
    sampled = [segment for segment in tree.segments if segment.sampled]
    assert len(sampled) == 3
    for segment in sampled:
        path = _path(result, segment.id)
        start = len(path) - len(segment.token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([path])).logits[0, start - 1 : -1].double()
        assert segment.support is not None
        for place, ids in enumerate(segment.support):
            allowed = torch.full_like(logits[place], -torch.inf)
            allowed[torch.from_numpy(ids).long()] = logits[place][torch.from_numpy(ids).long()]
            expected = allowed.log_softmax(-1)[segment.token_ids[place]]
            assert abs(float(expected) - segment.logprobs[place]) < TOLERANCE


async def until_retained(served: Served, num_sessions: int) -> None:
    """Wait until a heartbeat has reported KV of so many paused sessions."""
    async with asyncio.timeout(30):
        while served.server.engine.session_kv().num_sessions != num_sessions:
            await asyncio.sleep(0.05)


async def test_kv_of_a_paused_session_is_retained_until_it_ends(served: Served) -> None:
    async with AsyncRollouts(served.url) as client:
        group = await client.sessions.create(
            sampling={"max_tokens": 64}, overrides=["structured_outputs"]
        )
        [session] = group.sessions
        await run_loop(served, session)
        await until_retained(served, 1)
        counted = served.server.engine.session_kv()
        assert counted.num_blocks >= 2 and counted.num_released["returned"] >= 2
        await client.sessions.finish(session.id)
        await until_retained(served, 0)
        assert served.server.engine.session_kv().num_blocks == 0


def _path(result: SessionResult, segment_id: str) -> list[int]:
    """Tokens from the root of a session's only tree to the end of a segment."""
    [group] = result.groups
    assert group.tree is not None and group.prompt_token_ids is not None
    path = group.tree.path(segment_id)
    return [*group.prompt_token_ids.tolist(), *(t for s in path for t in s.token_ids.tolist())]
