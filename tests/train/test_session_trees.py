"""Trees of a group of sessions: what they share, their advantages, and their gradient."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from torch import Tensor

from coppice import Group, Rollouts, Segment, SessionResult, Support, Tree
from coppice.train import (
    LogitAdjustments,
    RowLogprobs,
    SessionTree,
    TrainingTree,
    advantages,
    group_logprobs,
    grouped_backward,
    session_trees,
)
from coppice.train.session_trees import Baseline
from coppice.wire.columns.weights_version_spans import VersionSpan
from coppice.wire.rollouts import SegmentFinish
from coppice.wire.sessions import SessionUsage, Turn
from tests.fake_engine import VOCAB_SIZE, FakeEngine
from tests.serving_thread import serving_in_thread
from tests.train.models import Gradients, error, gradients, tiny_model

PROMPT = [10, 11, 12]


def segment(
    name: str,
    parent: str | None,
    tokens: list[int],
    *,
    sampled: bool = True,
    support: Support | None = None,
    finish: SegmentFinish = "stop",
) -> Segment:
    return Segment(
        id=name,
        parent=parent,
        depth=0,
        token_ids=np.array(tokens),
        logprobs=np.full(len(tokens) if sampled else 0, -1.0, dtype=np.float32),
        entropy=None,
        finish_reason=finish if sampled else "cut",
        num_leaves=1,
        versions=(VersionSpan(version="v1", start=0, end=len(tokens)),) if sampled else (),
        sampled=sampled,
        support=support,
    )


def group_of(prompt: list[int], segments: tuple[Segment, ...]) -> Group:
    parents = {each.parent for each in segments}
    return Group(
        id="g",
        index=0,
        outcome="done",
        exact=True,
        num_prompt_tokens=len(prompt),
        num_cached_tokens=0,
        samples=(),
        tree=Tree(
            segments=segments,
            leaves=tuple(s.id for s in segments if s.id not in parents),
            is_session=True,
        ),
        prompt_token_ids=np.array(prompt),
    )


def session(
    name: str,
    reward: float | None,
    *groups: Group,
    rewards: dict[str, float] | None = None,
    turns: tuple[Turn, ...] = (),
) -> SessionResult:
    return SessionResult(
        id=name,
        group="g",
        state="finished",
        end_reason="finished",
        sequence=1,
        metadata={},
        reward=reward,
        rewards=rewards,
        groups=groups,
        turns=turns,
        usage=SessionUsage(),
    )


def called(prompt: list[int] = PROMPT) -> Group:
    """A call of a tool, its result, and an answer."""
    parts = (
        segment("a", None, [20, 21]),
        segment("b", "a", [30, 31], sampled=False),
        segment("c", "b", [22]),
    )
    return group_of(prompt, parts)


def direct(prompt: list[int] = PROMPT) -> Group:
    return group_of(prompt, (segment("a", None, [23, 24]),))


def forked() -> Group:
    """Two answers to two results after the same call."""
    parts = (
        segment("a", None, [20]),
        segment("b", "a", [30], sampled=False),
        segment("c", "b", [22]),
        segment("d", "a", [31], sampled=False),
        segment("e", "d", [23]),
    )
    return group_of(PROMPT, parts)


def test_sessions_of_a_group_are_one_tree_with_one_prompt() -> None:
    [found] = session_trees([session("s", 1.0, called()), session("t", 0.0, direct())])
    tree = found.tree
    assert tree.prompt.tolist() == PROMPT
    assert tree.parents == (None, 0, 1, None)
    assert tree.leaves == (2, 3)
    assert [(leaf.session, leaf.leaf) for leaf in found.leaves] == [("s", "c"), ("t", "a")]
    assert tree.target_lengths == (2, 0, 1, 2)
    assert [len(versions) for versions in found.versions] == [1, 0, 1, 1]
    gain, other = advantages(torch.tensor([1.0, 0.0])).tolist()
    assert found.leaf_advantages.tolist() == pytest.approx([gain, other])
    assert found.advantages.tolist() == pytest.approx([gain, gain, gain, other])


def test_equal_samples_remain_apart() -> None:
    [found] = session_trees([session("s", 1.0, called()), session("t", 0.0, called())])
    assert found.tree.parents == (None, 0, 1, None, 3, 4)


def test_different_prompts_are_different_trees() -> None:
    sessions = [session("s", 1.0, called()), session("t", 0.0, direct([10, 11, 13]))]
    assert [len(each.tree.responses) for each in session_trees(sessions)] == [3, 1]


def test_context_that_prompts_share_is_one_segment() -> None:
    """The third session's root is shorter, because a second conversation has split it."""
    first = list(range(100, 170))
    split = group_of(
        first,
        (
            segment("x", None, PROMPT, sampled=False),
            segment("a", "x", [20]),
            segment("y", None, [5], sampled=False),
            segment("b", "y", [21]),
        ),
    )
    whole = [session("s", 1.0, called(first + PROMPT)), session("t", 0.0, direct(first + [10, 7]))]
    [found] = session_trees([*whole, session("u", 0.0, split)])
    tree = found.tree
    assert tree.prompt.tolist() == first
    contexts = [
        tree.responses[at].tolist() for at, num in enumerate(tree.target_lengths) if not num
    ]
    assert contexts == [[10], [11, 12], [30, 31], [7], [5]]
    paths = [
        [token for at in tree.path(leaf) for token in tree.responses[at].tolist()]
        for leaf in tree.leaves
    ]
    assert sorted(paths) == sorted(
        [
            [*PROMPT, 20, 21, 30, 31, 22],
            [10, 7, 23, 24],
            [*PROMPT, 20],
            [5, 21],
        ]
    )


def test_segment_has_the_mean_advantage_of_its_leaves() -> None:
    one = session("s", 0.5, forked(), rewards={"e": 2.0})
    [found] = session_trees([one, session("t", 0.25, direct())], by_deviation=False)
    mean = ((0.5 + 2.0) / 2 + 0.25) / 2
    gains = [0.5 - mean, 2.0 - mean, 0.25 - mean]
    assert found.leaf_advantages.tolist() == pytest.approx(gains)
    shared = (gains[0] + gains[1]) / 2
    expected = [shared, gains[0], gains[0], gains[1], gains[1], gains[2]]
    assert found.advantages.tolist() == pytest.approx(expected)


def test_baseline_of_leaves_equals_grpo_over_all_leaves() -> None:
    one = session("s", 0.5, forked(), rewards={"e": 2.0})
    [found] = session_trees([one, session("t", 0.25, direct())], baseline="leaf")
    expected = advantages(torch.tensor([0.5, 2.0, 0.25])).tolist()
    assert found.leaf_advantages.tolist() == pytest.approx(expected)


def test_session_without_calls_counts_in_the_baseline_only() -> None:
    [found] = session_trees([session("s", 1.0, direct()), session("t", 0.0)], by_deviation=False)
    assert found.leaf_advantages.tolist() == [0.5]
    assert session_trees([session("s", 1.0)]) == session_trees([]) == []


def stopped(
    name: str, reward: float | None, *, rewards: dict[str, float] | None = None
) -> SessionResult:
    """Four turns with a hidden stop token each, which the prompt of the next one leaves out."""
    segments: list[Segment] = []
    parent = None
    for number in range(4):
        segments += [
            segment(f"t{number}", parent, [20 + number], finish="cut"),
            segment(f"h{number}", f"t{number}", [9]),
        ]
        parent = f"t{number}"
    segments.append(segment("last", parent, [30]))
    counts = {"num_prompt_tokens": 3, "num_cached_tokens": 0, "num_new_context_tokens": 0}
    turns = tuple(
        Turn(
            segment=each.id,
            attached="branched",
            reason="extended",
            finish_reason="stop",
            api="completions",
            num_hidden_tokens=1,
            **counts,
        )
        for each in segments
        if each.finish_reason == "stop"
    )
    return session(name, reward, group_of(PROMPT, tuple(segments)), rewards=rewards, turns=turns)


@pytest.mark.parametrize("baseline", ["session", "leaf"])
def test_hidden_ends_of_turns_do_not_count_as_leaves(baseline: Baseline) -> None:
    results = [stopped("s", 1.0), session("t", 0.0, direct())]
    [found] = session_trees(results, baseline=baseline, by_deviation=False)
    assert [(leaf.session, leaf.leaf) for leaf in found.leaves] == [("s", "last"), ("t", "a")]
    assert found.leaf_advantages.tolist() == [0.5, -0.5]
    assert found.advantages.tolist() == [0.5] * 9 + [-0.5]
    targets = [found.tree.flattened().targets(row).tolist() for row in range(2)]
    assert targets == [[20, 21, 22, 23, 30], [23, 24]]


def test_hidden_ends_of_turns_need_no_reward() -> None:
    by_leaf = {"last": 1.0}
    for one in (stopped("s", 0.0, rewards=by_leaf), stopped("s", None, rewards=by_leaf)):
        [found] = session_trees([one, session("t", 0.0, direct())], by_deviation=False)
        assert found.advantages.tolist() == [0.5] * 9 + [-0.5]


def test_groups_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(ValueError, match="leaf a of session s has no reward"):
        session_trees([session("s", None, direct())])
    with pytest.raises(ValueError, match="occurs twice"):
        session_trees([session("s", 1.0, direct()), session("s", 0.0, direct())])
    with pytest.raises(ValueError, match="unknown baseline"):
        session_trees([], baseline="group")  # type: ignore[arg-type]
    support = Support((b"\x00",), VOCAB_SIZE)
    supported = group_of(PROMPT, (segment("a", None, [1], support=support),))
    for other in (direct(), direct([200, 201, 202])):
        with pytest.raises(ValueError, match="only some of the samples have supports"):
            session_trees([session("s", 1.0, supported), session("t", 0.0, other)])


def test_logprobs_of_joined_trees_equal_those_of_each_session() -> None:
    sessions, model = [session("s", 1.0, called()), session("t", 0.0, direct())], tiny_model()
    [joined] = session_trees(sessions)
    rows = joined.tree.by_leaf(group_logprobs(model, joined.tree)).split()
    for row, each in zip(rows, sessions, strict=True):
        tree = TrainingTree.of(PROMPT, each.groups[0])
        [alone] = tree.by_leaf(group_logprobs(model, tree)).split()
        torch.testing.assert_close(row, alone, atol=1e-4, rtol=0)


ADJUSTMENTS = LogitAdjustments(
    logit_bias={65: 2.0, 70: -3.0},
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.3,
)
SAMPLING = {
    "max_tokens": 5,
    "temperature": 0.8,
    "top_p": 0.9,
    "logit_bias": {"65": 2.0, "70": -3.0},
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.3,
}
TASK = {"role": "user", "content": "The task of the agent, with a text of some length. " * 2}
OTHER = {"role": "user", "content": "A sub-agent begins with other instructions than the task. "}


CONTINUED = "This text is continued by completions. "


def stop_string(text: str) -> list[str]:
    """The third token that is sampled after a text, as a stop string."""
    return [chr(len(text) + 2)]


def complete(client: OpenAI) -> None:
    """Completions that continue the text before a stop string, and the same in a chat."""
    text = CONTINUED
    for _ in range(3):
        found = client.completions.create(model="any", prompt=text, stop=stop_string(text))
        text += found.choices[0].text
    asked: list[Any] = [{"role": "user", "content": CONTINUED}]
    for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        stop = stop_string("".join(message["content"] for message in asked))
        answer: Any = client.chat.completions.create(
            model="any", messages=asked, stop=stop, extra_body=more
        )
        asked.append({"role": "assistant", "content": answer.choices[0].message.content})


def converse(url: str, key: str, number: int) -> None:
    """Turns, two samples of one of them, an edited result, and a sub-agent in some sessions.

    All sessions also continue texts without the stop strings of their turns.
    """
    with OpenAI(base_url=url, api_key=key, max_retries=0) as client:

        def reply(*messages: dict[str, str], n: int = 1) -> dict[str, str]:
            asked: Any = list(messages)
            answer = client.chat.completions.create(model="any", messages=asked, n=n)
            return {"role": "assistant", "content": answer.choices[0].message.content or ""}

        first = reply(TASK)
        result = {"role": "user", "content": f"result {number}"}
        second = reply(TASK, first, result, n=2)
        reply(TASK, first, result, second, {"role": "user", "content": "more"})
        if number:
            reply(TASK, first, {"role": "user", "content": "another result"})
            other = reply(OTHER)
            reply(OTHER, other, {"role": "user", "content": "go on"})
        complete(client)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[SessionResult]:
    found = []
    with (
        serving_in_thread(FakeEngine(), tmp_path_factory.mktemp("server")) as url,
        Rollouts(url) as client,
    ):
        group = client.sessions.create(3, sampling=SAMPLING, return_support=True)
        for number, agent in enumerate(group.sessions):
            converse(agent.openai_url, agent.key, number)
            groups = client.sessions.tree(agent.id).groups
            leaves = [leaf for group in groups if group.tree for leaf in group.tree.leaves]
            rewards = {leaf: 1.5 * number - at for at, leaf in enumerate(leaves)}
            found.append(client.sessions.finish(agent.id, rewards=rewards))
    return found


@dataclass(frozen=True, kw_only=True)
class Row:
    """The path to a leaf, and the length of the prompt with which each segment was sampled."""

    name: str
    group: Group
    path: tuple[Segment, ...]
    num_prompt_tokens: dict[str, int]


def row_logprobs(model: object, each: Row) -> Tensor:
    """Logprobs of a row's sampled tokens by transformers, and the sampling steps one by one."""
    group, path = each.group, each.path
    assert callable(model) and group.prompt_token_ids is not None
    row = [*group.prompt_token_ids.tolist(), *(t for s in path for t in s.token_ids.tolist())]
    logits_TV = model(input_ids=torch.tensor([row])).logits[0]
    at, found = len(group.prompt_token_ids), []
    for part in path:
        request = each.num_prompt_tokens.get(part.id, at)
        for index, token in enumerate(part.token_ids.tolist()):
            if part.sampled:
                assert part.support is not None
                allowed = torch.from_numpy(part.support[index]).long()
                logits_V = adjusted(logits_TV[at - 1], row[:request], row[request:at])[allowed]
                found.append((logits_V / 0.8).log_softmax(-1)[(allowed == token).nonzero()[0, 0]])
            at += 1
    return torch.stack(found)


def adjusted(logits_V: Tensor, prompt: list[int], response: list[int]) -> Tensor:
    """vLLM's steps: the bias, then the penalties, for one position."""
    values = list(logits_V)
    for token, bias in ADJUSTMENTS.logit_bias.items():
        values[token] = values[token] + bias
    for token in {*prompt, *response}:
        value, penalty = values[token], ADJUSTMENTS.repetition_penalty
        values[token] = value / penalty if value > 0 else value * penalty
    for token in set(response):
        penalty = ADJUSTMENTS.frequency_penalty * response.count(token)
        values[token] = values[token] - penalty - ADJUSTMENTS.presence_penalty
    return torch.stack(values)


def num_prompt_tokens(result: SessionResult, group: Group) -> dict[str, int]:
    """Length of the prompt of the turn that sampled each segment."""
    assert group.tree is not None
    ids, found = {segment.id for segment in group.tree.segments}, {}
    for turn in result.turns:
        at = group.num_prompt_tokens
        for segment in group.tree.path(turn.segment or "") if turn.segment in ids else ():
            if at >= turn.num_prompt_tokens:
                found[segment.id] = turn.num_prompt_tokens
            at += len(segment.token_ids)
    return found


def rows_of(results: list[SessionResult]) -> Iterator[Row]:
    """Rows of all leaves, without those of stop strings that a prompt has left out."""
    for result in results:
        ends = {turn.segment for turn in result.turns if turn.num_hidden_tokens}
        for group in result.groups:
            assert group.tree is not None
            starts = num_prompt_tokens(result, group)
            for leaf in group.tree.leaves:
                path = group.tree.path(leaf)
                name = f"{result.id}/{leaf}"
                is_split = len(path) > 1 and starts.get(path[-2].id) == starts[leaf]
                if not (is_split and leaf in ends):
                    yield Row(name=name, group=group, path=path, num_prompt_tokens=starts)


def row_gradients(results: list[SessionResult], gains: dict[str, float]) -> Gradients:
    """Sum of the gradients of all rows, each in a pass of its own."""
    model = tiny_model(vocab_size=VOCAB_SIZE)
    for row in rows_of(results):
        logprobs = row_logprobs(model, row)
        sampled = torch.from_numpy(np.concatenate([s.logprobs for s in row.path if s.sampled]))
        ratios = (logprobs - sampled).clamp(max=3).exp()
        (-gains[row.name] * ratios.sum()).backward()  # type: ignore[no-untyped-call]
    return gradients(model)


def tree_gradients(trees: list[SessionTree]) -> tuple[Gradients, int]:
    """Gradient of the loss over all paths of the trees, and the number of embedded tokens."""
    model, embedded = tiny_model(vocab_size=VOCAB_SIZE), 0

    def count(module: object, inputs: tuple[Tensor, ...]) -> None:
        nonlocal embedded
        embedded += inputs[0].numel()

    model.model.embed_tokens.register_forward_pre_hook(count)
    for each in trees:

        def loss(segments: RowLogprobs, each: SessionTree = each) -> Tensor:
            rows, flat = each.tree.by_leaf(segments), each.tree.flattened()
            assert flat.logprobs is not None
            ratios = (rows.logprobs - rows.pick(flat.logprobs)).clamp(max=3).exp()
            return -(ratios * rows.spread(each.leaf_advantages)).sum()

        grouped_backward(model, each.tree, loss, schedule="kept", temperature=0.8)
    return gradients(model), embedded


@pytest.mark.slow
def test_gradient_of_a_group_of_sessions_is_the_sum_over_rows(
    results: list[SessionResult],
) -> None:
    trees = session_trees(results, adjustments=ADJUSTMENTS)
    assert len(trees) == 3 and all(each.tree.support for each in trees)
    gains = {
        f"{leaf.session}/{leaf.leaf}": gain
        for each in trees
        for leaf, gain in zip(each.leaves, each.leaf_advantages.tolist(), strict=True)
    }
    found, embedded = tree_gradients(trees)
    assert error(found, row_gradients(results, gains)) < 1e-5
    alone = sum(
        group.num_prompt_tokens + sum(len(s.token_ids) for s in group.tree.segments)
        for result in results
        for group in result.groups
        if group.tree
    )
    unique = sum(len(each.tree.prompt) + each.tree.num_tokens for each in trees)
    assert embedded <= unique < 0.8 * alone  # the last token of a leaf is not embedded


@pytest.mark.slow
def test_logprobs_of_turns_that_continue_a_response_are_those_of_their_requests(
    results: list[SessionResult],
) -> None:
    model, num_continued = tiny_model(vocab_size=VOCAB_SIZE), 0
    found = {
        f"{leaf.session}/{leaf.leaf}": row
        for each in session_trees(results, adjustments=ADJUSTMENTS)
        for leaf, row in zip(
            each.leaves,
            each.tree.by_leaf(group_logprobs(model, each.tree, temperature=0.8)).split(),
            strict=True,
        )
    }
    rows = list(rows_of(results))
    assert {row.name for row in rows} == found.keys()
    for row in rows:
        torch.testing.assert_close(found[row.name], row_logprobs(model, row), atol=1e-4, rtol=0)
        num_continued += sum(one.sampled and other.sampled for one, other in pairwise(row.path))
    assert num_continued == 3 * len(results)


@pytest.mark.slow
def test_tokens_keep_their_logprobs_supports_and_versions(results: list[SessionResult]) -> None:
    by_leaf = {row.name: row.path for row in rows_of(results)}
    for each in session_trees(results, adjustments=ADJUSTMENTS):
        flat = each.tree.flattened()
        assert flat.logprobs is not None and flat.support is not None
        for row, leaf in enumerate(each.leaves):
            sampled = [s for s in by_leaf[f"{leaf.session}/{leaf.leaf}"] if s.sampled]
            expected = np.concatenate([s.token_ids for s in sampled])
            assert flat.targets(row).tolist() == expected.tolist()
            logprobs = np.concatenate([s.logprobs for s in sampled])
            np.testing.assert_array_equal(flat.logprobs[row].numpy(), logprobs)
            rows = [row for s in sampled if s.support for row in s.support.rows]
            assert list(flat.support[row].rows) == rows
            path = each.tree.path(each.tree.leaves[row])
            versions = [each.versions[at] for at in path if each.versions[at]]
            assert versions == [s.versions for s in sampled]
