"""Agent sessions: calls, turns, sampling parameters, rewards, and the trees that come out."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coppice.session_results import session_result_of
from coppice.session_rows import trl_output
from coppice.wire.sessions import SessionAnswer
from service.sessions.call_recorder import CallRecorder
from tests.fake_engine import FakeEngine, Running
from tests.service.sessions.agents import HELLO, tokens, training

LIMITED = {"sampling": {"max_tokens": 3}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}


def replied(messages: list[Any], text: str, then: str) -> list[Any]:
    """A conversation with the answer of the last call and the next message of the user."""
    answer = {"role": "assistant", "content": text}
    return [*messages, answer, {"role": "user", "content": then}]


async def test_turns_of_a_conversation_are_one_path_of_a_tree(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED, metadata={"task": "17"})
        first = await agent.text()
        await agent.text(replied(HELLO, first, "next"))
        answer = await trainer.finish(agent, reward=0.5)
    assert answer["groups"][0]["prompt_token_ids"] == list(b"hello")
    assert tokens(answer) == [(True, [5, 6, 7]), (False, list(b"next")), (True, [12, 13, 14])]
    assert [turn["attached"] for turn in answer["turns"]] == ["root", "extended"]
    assert [turn["reason"] for turn in answer["turns"]] == ["new_conversation", "extended"]
    assert (answer["state"], answer["reward"], answer["metadata"]) == (
        "finished",
        0.5,
        {"task": "17"},
    )
    assert answer["usage"]["num_sampled_tokens"] == 6


async def test_history_of_the_template_is_rendered_again(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED, history="template")
        first = await agent.text()
        await agent.text(replied(HELLO, first, "next"))
        status = await trainer.status(agent)
    assert status["attached"] == {"new_conversation": 1, "template": 1}


async def test_edited_history_is_a_branch(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        await agent.text()
        await agent.text(replied(HELLO, "other", "next"))
        answer = await trainer.finish(agent)
    assert answer["turns"][1]["reason"] == "edited_history"
    assert answer["groups"][0]["leaves"] == [turn["segment"] for turn in answer["turns"]]


async def test_repeated_call_is_another_sample_of_the_same_prompt(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        await agent.text()
        await agent.text()
        answer = await trainer.finish(agent)
    assert tokens(answer) == [(True, [5, 6, 7])] * 2
    assert [turn["reason"] for turn in answer["turns"]] == ["new_conversation", "retry"]


async def test_calls_of_a_session_have_its_salt_and_priority(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        agents = await trainer.create(**LIMITED, n=2, priority=3)
        await agents[0].text(cache_salt="guess", priority=-(2**31))
        await agents[1].text()
        first, second = trainer.engine.submitted
    assert [first.cache_salt, second.cache_salt] == [agent.id for agent in agents]
    assert second.priority - first.priority < 20 * 10**6  # microseconds between the arrivals


async def test_sessions_of_a_group_share_prefixes_if_their_cache_scope_is_the_group(
    tmp_path: Path,
) -> None:
    async with training(tmp_path) as trainer:
        shared = await trainer.create(**LIMITED, n=2, cache_scope="group")
        others = await trainer.create(**LIMITED, n=2, cache_scope="group")
        apart = await trainer.create(**LIMITED, n=2)
        for agent in (*shared, *others, *apart):
            await agent.text(cache_salt="guess")
        salts = [sample.cache_salt for sample in trainer.engine.submitted]
    assert salts[0] == salts[1]
    assert salts[2] == salts[3]
    assert len(set(salts)) == 4


async def test_group_of_the_same_label_has_another_salt(tmp_path: Path) -> None:
    async with training(tmp_path, limits={"keep_answers_seconds": 0.001}) as trainer:
        for _ in range(2):
            [agent] = await trainer.create(**LIMITED, group="g", cache_scope="group")
            await agent.text()
            await trainer.finish(agent)
            trainer.served.server.sessions.check_due()
        first, second = trainer.engine.submitted
    assert first.cache_salt != second.cache_salt


async def test_sampling_parameters_of_the_agent_are_replaced_and_counted(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(sampling={"temperature": 0.5, "max_tokens": 4})
        await agent.text(temperature=0.1, top_p=0.1, seed=7, max_tokens=2, stop="zz")
        [sample] = trainer.engine.submitted
        count = trainer.served.server.metrics.registry.get_sample_value
        assert count("coppice_session_replaced_fields_total") == 3
    sampling = sample.sampling
    assert (sampling.temperature, sampling.top_p, sample.seed) == (0.5, 1.0, None)
    assert (sampling.max_tokens, sampling.stop) == (2, ("zz",))


async def test_default_values_that_the_agent_sends_count(tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 5,
        "presence_penalty": 1.0,
        "stop": ["q"],
    }
    sent: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1,
        "top_k": -1,
        "presence_penalty": 0,
        "stop": [],
    }
    async with training(tmp_path) as trainer:
        [strict] = await trainer.create(sampling={**own, "max_tokens": 3}, overrides=[])
        await strict.text(**sent)
        count = trainer.served.server.metrics.registry.get_sample_value
        assert count("coppice_session_replaced_fields_total") == len(own)
        [free] = await trainer.create(sampling={**own, "max_tokens": 3}, overrides=list(own))
        await free.text(**sent)
        await free.text(temperature=None)
        assert count("coppice_session_replaced_fields_total") == len(own)
    kept, chosen, silent = [sample.sampling for sample in trainer.engine.submitted]
    assert (kept.temperature, kept.stop) == (0.6, ("q",))
    assert (chosen.temperature, chosen.top_p, chosen.presence_penalty) == (1.0, 1.0, 0.0)
    assert (chosen.top_k, chosen.stop) == (0, ())
    assert silent == kept


async def test_max_tokens_of_the_session_is_an_upper_limit(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        await agent.text(max_completion_tokens=100)
    assert trainer.engine.submitted[0].sampling.max_tokens == 3


async def test_structured_outputs_need_an_override(tmp_path: Path) -> None:
    forced: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    async with training(tmp_path) as trainer:
        [strict] = await trainer.create(**LIMITED)
        refused = await strict.chat(**forced)
        [free] = await trainer.create(**LIMITED, overrides=["structured_outputs"])
        allowed = await free.chat(**forced)
    assert refused.status_code == 400
    assert "overrides" in refused.json()["error"]["message"]
    assert allowed.status_code == 200
    assert trainer.engine.submitted[0].sampling.structured_outputs is not None


async def test_model_names_of_agents_do_not_matter(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        assert (await agent.chat(model="gpt-4o")).json()["model"] == "gpt-4o"


async def test_tool_calls_keep_their_ids_between_answer_and_record(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        async with agent.openai() as speaker:
            answer = await speaker.chat.completions.create(
                model="any", messages=HELLO, tools=[TOOL]
            )
            message: Any = answer.choices[0].message.model_dump(exclude_none=True)
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]}
            conversation = [*HELLO, message, {**result, "content": "3"}]
            await speaker.chat.completions.create(model="any", messages=conversation, tools=[TOOL])
        status = await trainer.status(agent)
        assert len(trainer.session(agent).conversations._calls) == 2
    assert status["usage"]["num_turns"] == 2
    assert status["attached"] == {"new_conversation": 1, "extended": 1}


async def test_status_and_tree_have_every_response_that_an_agent_has_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = CallRecorder._add

    async def slow(*args: Any) -> Any:
        await asyncio.sleep(0.1)
        return await add(*args)

    monkeypatch.setattr(CallRecorder, "_add", slow)
    async with training(tmp_path) as trainer:
        one, other = await trainer.create(**LIMITED, n=2)
        await asyncio.gather(one.text(), other.text())
        assert (await trainer.status(one))["usage"]["num_turns"] == 1
        assert tokens(await trainer.tree(other)) == [(True, [5, 6, 7])]


async def test_streamed_call_is_recorded(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        async with agent.openai() as speaker:
            stream = await speaker.chat.completions.create(model="any", messages=HELLO, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        await agent.text(replied(HELLO, "".join(parts), "next"))
        answer = await trainer.finish(agent)
    assert [turn["attached"] for turn in answer["turns"]] == ["root", "extended"]


async def test_completions_continue_a_text(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        async with agent.openai() as speaker:
            first = await speaker.completions.create(model="any", prompt="ab")
            text = "ab" + first.choices[0].text + "cd"
            await speaker.completions.create(model="any", prompt=text)
            await speaker.completions.create(model="any", prompt=[7, 8])
            models = await speaker.models.list()
        answer = await trainer.finish(agent)
    assert [model.id for model in models.data] == ["fake"]
    assert [turn["reason"] for turn in answer["turns"]] == [
        *("new_conversation", "extended", "new_conversation")
    ]
    assert [group["prompt_token_ids"] for group in answer["groups"]] == [[97, 98], [7, 8]]
    assert {turn["api"] for turn in answer["turns"]} == {"completions"}


class HidingEngine(FakeEngine):
    """Samples end with a stop token, which is token `hidden` of the vocabulary or in the text."""

    def __init__(self, hidden: int | None) -> None:
        super().__init__()
        self.finish = "stop"
        self.hidden = hidden

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return super().decode([token for token in token_ids if token != self.hidden])


@pytest.mark.parametrize(
    ("hidden", "include", "ended_by", "sample"),
    [
        (None, False, "", [2, 3]),
        (None, False, "\x04", [2, 3, 4]),
        (None, True, "", [2, 3, 4]),
        (4, False, "", [2, 3]),
        (4, True, "", [2, 3]),
    ],
)
async def test_stop_token_is_left_out_of_a_continued_text_that_does_not_have_it(
    tmp_path: Path, hidden: int | None, include: bool, ended_by: str, sample: list[int]
) -> None:
    sampling = {"max_tokens": 3, "include_stop_str_in_output": include}
    async with training(tmp_path, HidingEngine(hidden)) as trainer:
        [agent] = await trainer.create(sampling=sampling)
        first = await agent.post("/v1/completions", {"prompt": "ab"})
        answer = first.json()["choices"][0]["text"].replace(chr(hidden or 0), "")
        text = "ab" + answer + ended_by + "cd"
        assert (await agent.post("/v1/completions", {"prompt": text})).status_code == 200
    prompt = trainer.engine.submitted[1].prompt_token_ids
    assert list(prompt) == [*b"ab", *sample, *b"cd"]


class RecordingEngine(FakeEngine):
    """Records the texts that are tokenized."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[str] = []

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        return super().encode_text(text)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("then", "sample", "tokenized"),
    [
        ("cd", [2, 3], "cd"),
        ("\x04\x05cd", [2, 3, 4, 5], "cd"),
        ("\x04cd", [2, 3], "\x04cd"),
    ],
)
async def test_response_that_a_stop_string_ends_is_continued_by_its_own_tokens(
    tmp_path: Path, include: bool, then: str, sample: list[int], tokenized: str
) -> None:
    sampling = {"max_tokens": 9, "include_stop_str_in_output": include}
    engine = RecordingEngine()
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(sampling=sampling)
        first = await agent.post("/v1/completions", {"prompt": "ab", "stop": "\x04\x05"})
        text = first.json()["choices"][0]["text"]
        assert text == ("\x02\x03\x04\x05" if include else "\x02\x03")
        answer = await agent.post("/v1/completions", {"prompt": "ab\x02\x03" + then})
        assert answer.status_code == 200
        [turn, _] = (await trainer.tree(agent))["turns"]
    assert list(engine.submitted[1].prompt_token_ids) == [*b"ab", *sample, *tokenized.encode()]
    assert engine.encoded == ["ab", tokenized]
    assert turn["num_hidden_tokens"] == (0 if include else 2)


async def test_completions_of_several_turns_are_one_row_for_trl(tmp_path: Path) -> None:
    async with training(tmp_path, HidingEngine(4)) as trainer:
        [agent] = await trainer.create(**LIMITED)
        first = await agent.post("/v1/completions", {"prompt": "ab"})
        text = "ab" + first.json()["choices"][0]["text"] + "cd"
        await agent.post("/v1/completions", {"prompt": text})
        answer = await trainer.finish(agent, reward=1.0)
    result = session_result_of(SessionAnswer.model_validate(answer))
    output = trl_output([result])
    assert output["completion_ids"] == [[2, 3, *b"cd", 6, 7, 8]]
    assert output["env_mask"] == [[1, 1, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize("hidden", [None, 7])
async def test_stop_token_is_left_out_of_a_continued_message(
    tmp_path: Path, hidden: int | None
) -> None:
    async with training(tmp_path, HidingEngine(hidden)) as trainer:
        [agent] = await trainer.create(**LIMITED)
        answer = {"role": "assistant", "content": await agent.text()}
        await agent.text([*HELLO, answer], continue_final_message=True, add_generation_prompt=False)
    prompt = trainer.engine.submitted[1].prompt_token_ids
    assert list(prompt) == [*b"hello", 5, 6]


async def test_continued_text_is_truncated_as_requested(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        first = await agent.post("/v1/completions", {"prompt": "ab"})
        text = "ab" + first.json()["choices"][0]["text"] + "cd"
        body = {"prompt": text, "truncate_prompt_tokens": 3}
        assert (await agent.post("/v1/completions", body)).status_code == 200
    assert list(trainer.engine.submitted[1].prompt_token_ids) == [4, *b"cd"]


async def test_several_prompts_and_echo_are_refused(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        for body in ({"prompt": ["a", "b"]}, {"prompt": "a", "echo": True}):
            answer = await agent.post("/v1/completions", body)
            assert answer.status_code == 400, answer.text
    assert trainer.engine.submitted == []


async def test_several_samples_of_a_call_are_siblings(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        await agent.text(n=2)
        answer = await trainer.finish(agent)
    assert tokens(answer) == [(True, [5, 6, 7])] * 2
    assert len(answer["turns"]) == 2


class CachingEngine(FakeEngine):
    """All samples but the first find four prompt tokens in the cache."""

    num_computed = 0

    def _compute_prompt(self, sample: Running) -> None:
        if not sample.computed:
            sample.num_cached = 4 if self.num_computed else 0
            self.num_computed += 1
        super()._compute_prompt(sample)


async def test_each_turn_has_the_cached_tokens_of_its_own_sample(tmp_path: Path) -> None:
    engine = CachingEngine(instant=False)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(**LIMITED)
        call = asyncio.create_task(agent.chat(n=3))
        async with asyncio.timeout(20):
            while len(engine.running) < 3:
                await asyncio.sleep(0.001)
        engine.step(3)
        assert (await call).status_code == 200
        answer = await trainer.finish(agent)
    assert [turn["num_cached_tokens"] for turn in answer["turns"]] == [0, 4, 4]
    assert answer["usage"]["num_forwarded_tokens"] == 5 + 1 + 1


async def test_support_and_top_logprobs_are_in_the_tree(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED, return_support=True, top_logprobs=2)
        answer = await agent.chat(logprobs=True, top_logprobs=1)
        assert answer.status_code == 200
        tree = await trainer.finish(agent)
    [segment] = tree["groups"][0]["segments"]
    assert len(segment["support"]["lengths"]) == 3
    assert segment["top_logprobs"]["offsets"] == [0, 2, 4, 6]


@pytest.mark.parametrize("stream", [False, True])
async def test_options_of_the_trainer_do_not_change_answers(tmp_path: Path, stream: bool) -> None:
    async def bodies(path: str, **fields: Any) -> str:
        answer = await agent.post(path, {**fields, "stream": stream})
        assert answer.status_code == 200, answer.text
        return answer.text

    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED, return_support=True, top_logprobs=4)
        chat: dict[str, Any] = {"path": "/v1/chat/completions", "messages": HELLO}
        text: dict[str, Any] = {"path": "/v1/completions", "prompt": "ab"}
        found = [
            await bodies(**chat, logprobs=True, top_logprobs=2),
            await bodies(**chat, logprobs=True, top_logprobs=0),
            await bodies(**text, logprobs=0),
        ]
        asked = [await bodies(**call, return_support=True) for call in (chat, text)]
        tree = await trainer.finish(agent)
    # Each of the three tokens has itself, and in chats its two most probable ones.
    assert found[0].count('"logprob"') == 9
    assert found[1].count('"logprob"') == 3
    assert '"top_logprobs":[{' not in found[1]
    assert "-0.5" in found[2]
    assert "-1.5" not in found[2]
    assert not any('"support"' in body for body in found)
    assert all('"support"' in body for body in asked)
    assert all("support" in segment for segment in tree["groups"][0]["segments"])


async def test_live_stream_has_as_many_top_logprobs_as_the_agent_asked_for(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(**LIMITED, top_logprobs=4)
        call = asyncio.create_task(agent.chat(logprobs=True, top_logprobs=2, stream=True))
        async with asyncio.timeout(20):
            while not call.done():
                engine.step()
                await asyncio.sleep(0.01)
        text = (await call).text
    assert text.count('"logprob"') == 9


async def test_rewards_of_leaves_are_returned_and_other_ids_refused(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        await agent.text(n=2)
        [group] = (await trainer.tree(agent))["groups"]
        path = f"/v1/sessions/{agent.id}/finish"
        refused = await trainer.served.http.post(path, json={"rewards": {"9.9": 1.0}})
        rewards = dict.fromkeys(group["leaves"], 0.25)
        answer = await trainer.finish(agent, rewards=rewards)
    assert refused.status_code == 422
    assert answer["rewards"] == rewards


async def test_versions_follow_an_activation_in_mid_session(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        first = await agent.text()
        http = trainer.served.http
        assert (await http.put("/v1/weights/v1", content=b"w")).status_code == 201
        assert (await http.post("/v1/weights/v1/activate", json={})).status_code == 200
        await agent.text(replied(HELLO, first, "next"))
        answer = await trainer.finish(agent)
        assert (await trainer.status(agent))["versions"] == ["v0", "v1"]
    sampled = [part for part in answer["groups"][0]["segments"] if part.get("sampled", True)]
    assert [part["versions"][0]["version"] for part in sampled] == ["v0", "v1"]


async def test_adapter_of_the_session_is_used(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED, adapter="missing")
        answer = await agent.chat()
    assert (answer.status_code, answer.json()["code"]) == (404, "adapter_not_found")
