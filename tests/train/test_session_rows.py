"""Training on a session: its trees and its exported rows have the same gradient."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from openai import OpenAI

from coppice import Rollouts, SessionResult
from coppice.rollout_results import Group
from coppice.session_rows import SessionRow, session_rows
from coppice.train import RowLogprobs, TrainingTree, grouped_backward
from tests.fake_engine import VOCAB_SIZE, FakeEngine
from tests.serving_thread import serving_in_thread
from tests.train.models import Gradients, error, gradients, tiny_model

pytestmark = pytest.mark.slow

TASK = {"role": "user", "content": "The task of the agent, with a text of some length. " * 2}
OTHER = {"role": "user", "content": "A sub-agent begins with other instructions than the task. "}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def converse(url: str, key: str) -> None:
    """Turns, a fork, an edited message, a retry with two samples, and a sub-agent of two turns."""
    with OpenAI(base_url=url, api_key=key, max_retries=0) as client:

        def reply(*messages: Mapping[str, str], n: int = 1) -> dict[str, str]:
            asked: Any = list(messages)
            answer = client.chat.completions.create(model="any", messages=asked, n=n)
            return {"role": "assistant", "content": answer.choices[0].message.content or ""}

        first = reply(TASK)
        second = reply(TASK, first, user("a result"))
        reply(TASK, first, user("a result"), second, user("more"))
        reply(TASK, first, user("another result"))
        reply(TASK, {**first, "content": "edited"}, user("a result"), n=2)
        other = reply(OTHER)
        reply(OTHER, other, user("go on"))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> SessionResult:
    with (
        serving_in_thread(FakeEngine(), tmp_path_factory.mktemp("server")) as url,
        Rollouts(url) as client,
    ):
        sessions = client.sessions
        [agent] = sessions.create(sampling={"max_tokens": 5}).sessions
        converse(agent.openai_url, agent.key)
        groups = sessions.tree(agent.id).groups
        leaves = [leaf for group in groups if group.tree for leaf in group.tree.leaves]
        return sessions.finish(agent.id, rewards={leaf: 1.5 - at for at, leaf in enumerate(leaves)})


def row_gradients(rows: list[SessionRow]) -> Gradients:
    """Sum of the gradients of the rows, each in a pass of its own, by transformers alone."""
    model = tiny_model(vocab_size=VOCAB_SIZE)
    for row in rows:
        tokens = torch.tensor([*row.prompt_ids, *row.response_ids])
        logits = model(input_ids=tokens[None, :-1]).logits[0, len(row.prompt_ids) - 1 :]
        targets = tokens[len(row.prompt_ids) :, None]
        logprobs = logits.log_softmax(-1).gather(1, targets)[:, 0]
        ratios = (logprobs - torch.from_numpy(row.logprobs)).exp()
        assert row.reward is not None
        (-row.reward * ratios[torch.from_numpy(row.loss_mask)].sum()).backward()
    return gradients(model)


def segment_gains(group: Group, rewards: Mapping[str, float], *, once: bool) -> torch.Tensor:
    """Weight of each segment: the reward of its first leaf, or the sum over its leaves."""
    assert group.tree is not None
    gains = dict.fromkeys((segment.id for segment in group.tree.segments), 0.0)
    trained: set[str] = set()
    for leaf in group.tree.leaves:
        for segment in group.tree.path(leaf):
            if not once or segment.id not in trained:
                gains[segment.id] += rewards[leaf]
            trained.add(segment.id)
    return torch.tensor(list(gains.values()))


def tree_gradients(result: SessionResult, *, once: bool) -> tuple[Gradients, int, int]:
    """Gradient of the trees, the number of embedded tokens, and that of the unique tokens."""
    model, embedded, unique = tiny_model(vocab_size=VOCAB_SIZE), 0, 0

    def count(module: Any, inputs: Any) -> None:
        nonlocal embedded
        embedded += inputs[0].numel()

    model.model.embed_tokens.register_forward_pre_hook(count)
    for group in result.groups:
        assert result.rewards is not None
        tree = TrainingTree.of(group.prompt_token_ids, group)
        gains = segment_gains(group, result.rewards, once=once)
        unique += len(tree.prompt) + tree.num_tokens

        def loss(
            found: RowLogprobs, tree: TrainingTree = tree, gains: torch.Tensor = gains
        ) -> torch.Tensor:
            assert tree.logprobs is not None
            ratios = (found.logprobs - found.pick(tree.logprobs)).exp()
            return -(ratios * found.spread(gains)).sum()

        grouped_backward(model, tree, loss, schedule="kept")
    return gradients(model), embedded, unique


@pytest.mark.parametrize("once", [True, False])
def test_gradient_of_trees_is_the_sum_over_rows(result: SessionResult, once: bool) -> None:
    rows = session_rows(result, train_once=once)
    found, embedded, unique = tree_gradients(result, once=once)
    assert error(found, row_gradients(rows)) < 1e-5
    assert embedded <= 1.05 * unique
    assert sum(len(row.prompt_ids) + len(row.response_ids) for row in rows) > 1.5 * unique


def test_each_sampled_token_is_trained_in_one_row(result: SessionResult) -> None:
    assert len(result.groups) == 2
    sampled = sum(group.tree.num_tokens for group in result.groups if group.tree)
    once, always = session_rows(result), session_rows(result, train_once=False)
    assert [row.leaf for row in once] == [row.leaf for row in always]
    assert sum(row.num_trained for row in once) == sampled == result.usage.num_sampled_tokens
    assert sum(row.num_trained for row in always) > sampled
