"""Agents with OpenAI's and Anthropic's clients on the real engine, and training on their trees."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import pytest_asyncio
import torch
from anthropic import AsyncAnthropic, beta_async_tool
from mcp import Client
from mcp.server.mcpserver import MCPServer
from openai import AsyncOpenAI

from coppice import AsyncRollouts
from coppice.session_results import AgentSession, SessionResult
from coppice.train import (
    LogitAdjustments,
    RowLogprobs,
    SessionTree,
    advantages,
    grouped_backward,
    session_trees,
)
from engine.types.feature_stats import KvRetentionStats
from engine.types.samples import Completion, SampleRequest
from tests.engine.seedling import BLOCK, MODEL, reference, settings
from tests.service.sessions.agents import Trainer
from tests.service.sessions.harness import Harness
from tests.service.sessions.scripted_engine import Sampled
from tests.serving import Served, serving
from tests.train.models import Gradients, error, gradients
from tests.train.test_session_trees import num_prompt_tokens

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

    class RecordedEngine(VllmEngine):
        async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
            completions = await super().submit(samples)
            return [_record(*each) for each in zip(samples, completions, strict=True)]

    folder = tmp_path_factory.mktemp("sessions")
    model = shutil.copytree(MODEL, folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    engine = RecordedEngine(
        settings(
            model, tool_parser="pythonic", vllm_args={"structured_outputs_config": WITHOUT_SPACES}
        )
    )
    async with serving(engine, folder) as served:
        yield served


SAMPLED: list[Sampled] = []
"""All calls of the engine."""


async def _record(sample: SampleRequest, waiting: Awaitable[Completion]) -> Completion:
    completion = await waiting
    SAMPLED.append(
        Sampled(
            session=sample.cache_salt,
            prompt=list(sample.prompt_token_ids),
            token_ids=list(completion.token_ids),
            logprobs=list(completion.logprobs),
        )
    )
    return completion


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


async def until(served: Served, holds: Callable[[KvRetentionStats], bool]) -> KvRetentionStats:
    """Wait until a heartbeat has reported counts for which a condition holds."""
    async with asyncio.timeout(30):
        while not holds(counted := served.server.engine.stats(KvRetentionStats)):
            await asyncio.sleep(0.05)
    return counted


def num_returned(counted: KvRetentionStats) -> int:
    return counted.num_released.get("returned", 0)


async def test_kv_of_a_paused_session_is_retained_until_it_ends(served: Served) -> None:
    await until(served, lambda counted: not counted.num_sessions)  # those of other tests have ended
    async with AsyncRollouts(served.url) as client:
        group = await client.sessions.create(
            sampling={"max_tokens": 64}, overrides=["structured_outputs"]
        )
        [session] = group.sessions
        await run_loop(served, session)
        before = num_returned(await until(served, lambda counted: counted.num_blocks >= 2))
        await run_loop(served, session)
        await until(
            served,
            lambda counted: counted.num_blocks >= 2 and num_returned(counted) >= before + 2,
        )
        await client.sessions.finish(session.id)
        await until(served, lambda counted: counted.num_blocks == counted.num_sessions == 0)


TEMPERATURE = 0.8
PENALTIES = LogitAdjustments(presence_penalty=0.5, frequency_penalty=0.25)
STOP: dict[str, Any] = {"stop": [*"1234"], "max_tokens": 24}
"""Ends a sample of arithmetic at a digit, but after the first tokens."""
WITH_STOP = WITH_IDS | {"min_tokens": 3}
Turns = list[tuple[list[int], list[int]]]


async def converse_as_openai(session: AgentSession, number: int) -> Turns:
    """Two turns, and another continuation of the first one."""
    turns: Turns = []
    async with AsyncOpenAI(base_url=session.openai_url, api_key=session.key) as agent:

        async def reply(messages: list[Any]) -> Any:
            answer: Any = await agent.chat.completions.create(
                model="any", messages=messages, extra_body=WITH_IDS
            )
            [choice] = answer.choices
            turns.append((answer.prompt_token_ids, choice.token_ids))
            return {"role": "assistant", "content": choice.message.content}

        first = await reply(TASK)
        for text in (f"the result is {number}", f"the other result is {number}"):
            await reply([*TASK, first, {"role": "user", "content": text}])
    return turns


async def converse_as_anthropic(session: AgentSession) -> Turns:
    """Two turns of a sub-agent with other instructions."""
    turns: Turns = []
    messages: list[Any] = [{"role": "user", "content": "Another agent solves 7*8. " * 4}]
    async with AsyncAnthropic(base_url=session.base_url, api_key=session.key) as agent:
        for text in ("check it", "go on"):
            answer = await agent.messages.create(model="any", max_tokens=24, messages=messages)
            turns.append((SAMPLED[-1].prompt, SAMPLED[-1].token_ids))
            messages.append({"role": "assistant", "content": answer.content})
            messages.append({"role": "user", "content": text})
    return turns


async def continue_texts(session: AgentSession) -> Turns:
    """Completions that continue the text before a stop string, and the same in a chat."""
    turns: Turns = []
    text, messages = "Numbers: 3+4=7, 10+2=12, 5+5=10, ", list[Any]()
    messages.append({"role": "user", "content": "Write sums like 20+21=41. " * 4})
    async with AsyncOpenAI(base_url=session.openai_url, api_key=session.key) as agent:
        for _ in range(3):
            completion: Any = await agent.completions.create(
                model="any", prompt=text, extra_body=WITH_STOP, **STOP
            )
            [choice] = completion.choices
            turns.append((choice.prompt_token_ids, choice.token_ids))
            text += choice.text
        for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
            answer: Any = await agent.chat.completions.create(
                model="any", messages=messages, extra_body=WITH_STOP | more, **STOP
            )
            [choice] = answer.choices
            turns.append((answer.prompt_token_ids, choice.token_ids))
            messages.append({"role": "assistant", "content": choice.message.content})
    return turns


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def episodes(served: Served) -> list[tuple[SessionResult, Turns]]:
    """Two sessions of one task, with what their clients received."""
    found = []
    async with AsyncRollouts(served.url) as client:
        group = await client.sessions.create(
            2,
            sampling={
                "max_tokens": 24,
                "temperature": TEMPERATURE,
                "top_p": 0.97,
                "presence_penalty": PENALTIES.presence_penalty,
                "frequency_penalty": PENALTIES.frequency_penalty,
            },
            overrides=["max_tokens", "min_tokens", "stop"],
            return_support=True,
        )
        for number, session in enumerate(group.sessions):
            turns = await converse_as_openai(session, number)
            turns += await converse_as_anthropic(session)
            turns += await continue_texts(session)
            found.append((await client.sessions.finish(session.id, reward=float(number)), turns))
    return found


async def test_every_token_of_both_apis_is_in_the_trees_as_sampled(
    episodes: list[tuple[SessionResult, Turns]],
) -> None:
    for result, turns in episodes:
        assert [turn.api for turn in result.turns] == [
            *(["chat"] * 3 + ["messages"] * 2 + ["completions"] * 3 + ["chat"] * 2)
        ]
        for turn, (prompt, sampled) in zip(result.turns, turns, strict=True):
            paths = [path for path in paths_of(result) if turn.segment in path.ids]
            assert paths and all(path.starts_with(prompt + sampled) for path in paths)
        trees = [group.tree for group in result.groups if group.tree]
        num_sampled = sum(len(sampled) for _, sampled in turns)
        assert sum(tree.num_tokens for tree in trees) == num_sampled


@dataclass(frozen=True)
class Path:
    """The path to a leaf, with the request, the support and the logprob of each sampled token.

    A request is the number of tokens in its prompt.
    """

    ids: list[str]
    tokens: list[int]
    sampled: list[tuple[int, int, Any, float]]

    def starts_with(self, tokens: list[int]) -> bool:
        return self.tokens[: len(tokens)] == tokens


def paths_of(result: SessionResult) -> list[Path]:
    found = []
    for group in result.groups:
        assert group.tree is not None and group.prompt_token_ids is not None
        requests = num_prompt_tokens(result, group)
        for leaf in group.tree.leaves:
            segments, tokens = group.tree.path(leaf), group.prompt_token_ids.tolist()
            sampled: list[tuple[int, int, Any, float]] = []
            for segment in segments:
                places = range(len(tokens), len(tokens) + len(segment.token_ids))
                tokens = [*tokens, *segment.token_ids.tolist()]
                if segment.sampled:
                    assert segment.support is not None
                    logprobs = segment.logprobs.tolist()
                    request = [requests[segment.id]] * len(places)
                    sampled += zip(places, request, segment.support, logprobs, strict=True)
            found.append(Path([segment.id for segment in segments], tokens, sampled))
    return found


async def test_gradient_of_the_sessions_is_the_sum_over_their_rows(
    episodes: list[tuple[SessionResult, Turns]],
) -> None:
    """Each row in a forward of its own; each token of the trees in one forward."""
    results = [result for result, _ in episodes]
    trees = session_trees(results, adjustments=PENALTIES)
    assert [len(each.leaves) for each in trees] == [4, 2, 2, 2]
    assert sum(turn.num_hidden_tokens > 0 for result in results for turn in result.turns) > 4
    leaves = {leaf.leaf for each in trees for leaf in each.leaves}
    by_tree, num_embedded = tree_gradients(trees)
    assert error(by_tree, row_gradients(results, leaves)) < 1e-4
    unique = sum(len(each.tree.prompt) + each.tree.num_tokens for each in trees)
    assert num_embedded <= 1.05 * unique


def row_gradients(results: list[SessionResult], leaves: set[str]) -> Gradients:
    """Sum over the rows by transformers alone; each logprob is compared with the engine's.

    Rows of stop strings that a prompt has left out have no gradient.
    """
    model = reference()
    rewards = torch.tensor([result.reward for result in results], dtype=torch.float64)
    for result, gain in zip(results, advantages(rewards).tolist(), strict=True):
        for path in paths_of(result):
            logits, ratios = model(torch.tensor([path.tokens])).logits[0], []
            for place, request, ids, served in path.sampled:
                penalized = _penalized(logits[place - 1], path.tokens[request:place])
                allowed = torch.from_numpy(ids).long()
                at = (allowed == path.tokens[place]).nonzero()[0, 0]
                logprob = (penalized[allowed] / TEMPERATURE).log_softmax(-1)[at]
                assert abs(logprob.item() - served) < TOLERANCE
                ratios.append((logprob - served).exp())
            if path.ids[-1] in leaves:
                (-gain * torch.stack(ratios).sum()).backward()
    return gradients(model)


def _penalized(logits: torch.Tensor, earlier: list[int]) -> torch.Tensor:
    counts = torch.bincount(torch.tensor(earlier, dtype=torch.int64), minlength=len(logits))
    penalties = PENALTIES.frequency_penalty * counts + PENALTIES.presence_penalty * (counts > 0)
    return logits - penalties


def tree_gradients(trees: list[SessionTree]) -> tuple[Gradients, int]:
    """Gradient of the loss over all paths, and the number of embedded tokens."""
    model, num_embedded = reference(), 0

    def count(module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal num_embedded
        num_embedded += inputs[0].numel()

    model.model.embed_tokens.register_forward_pre_hook(count)
    for each in trees:

        def loss(segments: RowLogprobs, each: SessionTree = each) -> torch.Tensor:
            rows, flat = each.tree.by_leaf(segments), each.tree.flattened()
            assert flat.logprobs is not None
            ratios = (rows.logprobs - rows.pick(flat.logprobs)).exp()
            return -(ratios * rows.spread(each.leaf_advantages)).sum()

        grouped_backward(model, each.tree, loss, schedule="kept", temperature=TEMPERATURE)
    return gradients(model), num_embedded


def _path(result: SessionResult, segment_id: str) -> list[int]:
    """Tokens from the root of a session's only tree to the end of a segment."""
    [group] = result.groups
    assert group.tree is not None and group.prompt_token_ids is not None
    path = group.tree.path(segment_id)
    return [*group.prompt_token_ids.tolist(), *(t for s in path for t in s.token_ids.tolist())]


@beta_async_tool
async def add(a: Literal[1, 2, 3]) -> str:
    """Adds a number."""
    return f"the sum is {a}"


async def run_anthropic_agent(harness: Harness) -> None:
    """Two tool calls of Anthropic's tool runner."""
    agent = harness.agent
    async with AsyncAnthropic(base_url=agent.url, api_key=agent.key, max_retries=0) as client:
        runner: Any = client.beta.messages.tool_runner(
            model="any",
            max_tokens=64,
            messages=TASK,
            tools=[add],
            tool_choice={"type": "tool", "name": "add"},
            max_iterations=2,
        )
        responses = [response async for response in runner]
    assert [response.content[-1].name for response in responses] == ["add", "add"]


async def run_mcp_agent(harness: Harness) -> None:
    """Two calls of an MCP server's tool and a streamed text, over OpenAI's Responses API."""
    server = MCPServer("calculator")
    server.tool()(add.func)
    async with harness.agent.openai() as client, Client(server) as tools:
        [tool] = (await tools.list_tools()).tools
        offered = [{"type": "function", "name": tool.name, "parameters": tool.input_schema}]
        asked: dict[str, Any] = {"model": "any", "tools": offered, "store": False}
        items: list[Any] = list(TASK)
        for _ in range(2):
            choice: Any = {"type": "function", "name": tool.name}
            response: Any = await client.responses.create(input=items, tool_choice=choice, **asked)
            [call] = response.output
            result: Any = await tools.call_tool(call.name, json.loads(call.arguments))
            text = result.content[0].text
            assert text.startswith("the sum is")
            output = {"type": "function_call_output", "call_id": call.call_id, "output": text}
            items += [call.to_dict(), output]
        async with client.responses.stream(input=items, **asked) as stream:
            usage = (await stream.get_final_response()).usage
        assert usage is not None and usage.output_tokens


async def test_agents_of_both_vendors_run_at_the_same_time(served: Served) -> None:
    trainer = Trainer(served, served.server.engine, served.http)
    sampling = {"max_tokens": 64, "temperature": 0.8}
    agents = await trainer.create(n=4, sampling=sampling, overrides=["structured_outputs"])
    harnesses = [Harness(trainer, agent, SAMPLED) for agent in agents]
    async with asyncio.TaskGroup() as tasks:
        for one, other in zip(harnesses[:2], harnesses[2:], strict=True):
            tasks.create_task(run_anthropic_agent(one))
            tasks.create_task(run_mcp_agent(other))
    for harness in harnesses[:2]:
        await harness.check(num_calls=2)
    for harness in harnesses[2:]:
        await harness.check(num_calls=3)
