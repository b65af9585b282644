"""Rows of sessions, in the field names of trainers."""

import ast
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field

from coppice import SessionResult
from coppice.session_results import session_result_of
from coppice.session_rows import SessionRow, session_rows, trl_output
from coppice.wire.columns.support import support_answer
from coppice.wire.columns.weights_version_spans import VersionSpan
from coppice.wire.rollouts import GroupAnswer, SegmentAnswer, SegmentFinish
from coppice.wire.sessions import SessionAnswer, SessionUsage, Turn
from engine.sampling.support_encoding import encode_mask
from tests.compat.programs import ROOT, install

VOCAB_SIZE = 16
EVERY = range(VOCAB_SIZE)


def segment(
    name: str,
    parent: str | None,
    tokens: list[int],
    *,
    sampled: bool = True,
    finish: SegmentFinish = "stop",
    version: str = "v0",
    support: Sequence[Sequence[int]] | None = None,
) -> SegmentAnswer:
    spans = [VersionSpan(version=version, start=0, end=len(tokens))]
    return SegmentAnswer(
        id=name,
        parent=parent,
        depth=0,
        token_ids=tokens,
        logprobs=[-token / 10 for token in tokens] if sampled else [],
        entropy=None,
        finish_reason=finish if sampled else "cut",
        num_leaves=None,
        versions=spans if sampled else [],
        sampled=sampled,
        support=None if support is None else support_answer(map(encoded, support), VOCAB_SIZE),
    )


def encoded(ids: Sequence[int]) -> bytes:
    mask = np.zeros(VOCAB_SIZE, np.bool_)
    mask[list(ids)] = True
    return encode_mask(mask)


def session(
    segments: list[SegmentAnswer], leaves: list[str], *, num_hidden: int = 0, **outcome: Any
) -> SessionResult:
    group = GroupAnswer(
        id="g",
        index=0,
        outcome="done",
        num_prompt_tokens=2,
        prompt_token_ids=[1, 2],
        num_cached_tokens=0,
        leaves=leaves,
        samples=[],
        segments=segments,
    )
    counts = {"num_prompt_tokens": 2, "num_cached_tokens": 0, "num_new_context_tokens": 0}
    counts["num_hidden_tokens"] = num_hidden
    turns = [
        Turn(
            segment=each.id,
            attached="extended",
            reason="extended",
            finish_reason=each.finish_reason,
            api="chat",
            **counts,
        )
        for each in segments
        if each.sampled and each.finish_reason != "cut"
    ]
    return session_result_of(
        SessionAnswer(
            id="s",
            group="g",
            state="finished",
            metadata={},
            groups=[group],
            turns=turns,
            usage=SessionUsage(),
            **outcome,
        )
    )


def forked(**outcome: Any) -> SessionResult:
    """A turn, then a tool's result and a turn, or another user's message and a turn."""
    segments = [
        segment("a", None, [3, 4]),
        segment("b", "a", [5], sampled=False),
        segment("c", "b", [6, 7], version="v1"),
        segment("d", "a", [8, 9], sampled=False),
        segment("e", "d", [10]),
    ]
    return session(segments, ["c", "e"], **outcome)


def straight() -> SessionResult:
    """Context before the first sample, then two turns."""
    segments = [
        segment("x", None, [3], sampled=False),
        segment("a", "x", [4, 5]),
        segment("b", "a", [6], sampled=False),
        segment("c", "b", [7]),
    ]
    return session(segments, ["c"], reward=1.0)


def completed(num_hidden: int = 1, *, continued: bool = True) -> SessionResult:
    """Two completions; the prompt of the second one continues the first without its stop token."""
    segments = [segment("a", None, [3, 4], finish="cut"), segment("b", "a", [9])]
    if continued:
        segments += [segment("c", "a", [6], sampled=False), segment("d", "c", [7, 9])]
    leaves = ["b", "d"] if continued else ["b"]
    return session(segments, leaves, num_hidden=num_hidden, reward=1.0)


def masks(rows: list[SessionRow]) -> list[list[int]]:
    return [row.loss_mask.astype(int).tolist() for row in rows]


def test_row_is_the_path_to_a_leaf() -> None:
    row, other = session_rows(forked(reward=0.5, rewards={"e": 2.0}))
    assert (row.session, row.leaf, row.reward, row.num_turns) == ("s", "c", 0.5, 2)
    assert (other.leaf, other.reward) == ("e", 2.0)
    assert row.prompt_ids.tolist() == [1, 2]
    assert row.response_ids.tolist() == [3, 4, 5, 6, 7]
    np.testing.assert_allclose(row.logprobs, [-0.3, -0.4, 0.0, -0.6, -0.7], rtol=1e-6)
    assert [(span.version, span.start, span.end) for span in row.versions] == [
        ("v0", 0, 2),
        ("v1", 3, 5),
    ]


def test_shared_tokens_are_trained_in_the_first_row_or_in_all() -> None:
    assert masks(session_rows(forked())) == [[1, 1, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert masks(session_rows(forked(), train_once=False)) == [[1, 1, 0, 1, 1], [1, 1, 0, 0, 1]]


def test_context_before_the_first_sample_belongs_to_the_prompt() -> None:
    [row] = session_rows(straight())
    assert (row.prompt_ids.tolist(), row.response_ids.tolist()) == ([1, 2, 3], [4, 5, 6, 7])


def test_leaf_without_tokens_to_train_has_no_row() -> None:
    empty = [segment("a", None, []), segment("b", None, [3])]
    assert [row.leaf for row in session_rows(session(empty, ["a", "b"]))] == ["b"]


def test_stop_token_that_the_next_prompt_leaves_out_has_a_row_after_the_others() -> None:
    row, end = session_rows(completed())
    assert (row.leaf, row.is_hidden_end, row.num_turns) == ("d", False, 2)
    assert (end.leaf, end.is_hidden_end, end.num_turns) == ("b", True, 1)
    assert masks([row, end]) == [[1, 1, 0, 1, 1], [0, 0, 1]]


def test_trl_gets_one_row_of_completions_that_continue_a_text() -> None:
    output = trl_output([completed()])
    assert output["completion_ids"] == [[3, 4, 6, 7, 9]]
    assert output["env_mask"] == [[1, 1, 0, 1, 1]]


def test_end_of_a_sample_that_was_visible_is_a_row_of_its_own() -> None:
    assert [row.is_hidden_end for row in session_rows(completed(num_hidden=0))] == [False, False]
    with pytest.raises(ValueError, match="has 2 rows"):
        trl_output([completed(num_hidden=0)])


def test_end_of_a_sample_that_nothing_continues_is_a_part_of_its_row() -> None:
    assert trl_output([completed(continued=False)])["completion_ids"] == [[3, 4, 9]]


def test_trl_gets_one_row_per_prompt() -> None:
    output = trl_output([straight()])
    assert output == {
        "prompt_ids": [[1, 2, 3]],
        "completion_ids": [[4, 5, 6, 7]],
        "logprobs": [pytest.approx([-0.4, -0.5, 0.0, -0.7])],
        "env_mask": [[1, 1, 0, 1]],
        "reward": [1.0],
    }
    with pytest.raises(ValueError, match="has 2 rows"):
        trl_output([forked()])
    [longest] = trl_output([forked()], longest=True)["env_mask"]
    assert longest == [1, 1, 0, 1, 1]


def test_trl_1_16_reads_these_fields() -> None:
    """TRL takes `env_mask` out of the fields, and checks for the three others."""
    install("clients")
    source = (ROOT / ".clients" / "trl" / "trainer" / "grpo_trainer.py").read_text()
    required = 'required_keys = {"prompt_ids", "completion_ids", "logprobs"}'
    assert required in source and 'extra_fields.pop("env_mask", None)' in source


def verl_classes() -> dict[str, Any]:
    """`AgentLoopOutput` of verl 0.9.1; its module imports Ray, which is not installed."""
    install("clients")
    path = ROOT / ".clients" / "verl" / "experimental" / "agent_loop" / "agent_loop.py"
    names = ("AgentLoopMetrics", "AgentLoopOutput")
    body = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") in names]
    prelude = "from typing import *\nimport torch\nfrom pydantic import BaseModel, ConfigDict\n"
    scope: dict[str, Any] = {}
    exec(prelude + "\n".join(map(ast.unparse, body)), scope)
    return scope


def test_verl_accepts_the_row() -> None:
    output_class = verl_classes()["AgentLoopOutput"]
    row, _ = session_rows(forked(reward=0.5))
    fields = row.verl_output()
    assert fields.keys() <= output_class.model_fields.keys()
    tensors = output_class(**fields).as_dict()
    assert tensors["prompts"].tolist() == [1, 2]
    assert tensors["responses"].tolist() == [3, 4, 5, 6, 7]
    assert tensors["response_mask"].tolist() == [1, 1, 0, 1, 1]
    assert tensors["rm_scores"].tolist() == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert tensors["rollout_log_probs"].tolist() == pytest.approx([-0.3, -0.4, 0.0, -0.6, -0.7])
    assert tensors["extra_fields"]["leaf"] == "c"


class TrainingSample(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Required fields of prime-rl's, at src/prime_rl/transports/rollouts/types.py of 559b44772e.

    prime-rl 0.8.0 is in no package index.
    """

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str


def test_prime_rl_accepts_the_row() -> None:
    row, _ = session_rows(forked())
    sample = TrainingSample(**row.prime_rl_sample(env_name="sums", temperature=0.5))
    sample = msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=TrainingSample)
    assert sample.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert sample.mask == [False, False, True, True, False, True, True]
    assert sample.logprobs == pytest.approx([0.0, 0.0, -0.3, -0.4, 0.0, -0.6, -0.7])
    assert (sample.temperatures, sample.env_name) == ([0.5] * 7, "sums")


class Step(BaseModel):
    """Fields of rLLM's `Step`, at rllm/types.py of 9beb6e0f67 (0.3.0.pre), in no package index."""

    model_config = ConfigDict(extra="forbid")

    prompt_ids: list[int] = Field(default_factory=list)
    response_ids: list[int] = Field(default_factory=list)
    logprobs: list[float] = Field(default_factory=list)
    reward: float = 0.0
    done: bool = False


class Trajectory(BaseModel):
    """Fields of rLLM's `Trajectory`, from the same file."""

    model_config = ConfigDict(extra="forbid")

    name: str = "default_traj_name"
    steps: list[Step] = Field(default_factory=list)
    reward: float | None = None
    metadata: dict[str, Any] | None = None


def test_rllm_gets_a_step_per_turn_whose_prompt_is_all_before_it() -> None:
    rows = session_rows(forked(rewards={"c": 1.0, "e": 0.0}))
    found = [Trajectory(**row.rllm_trajectory(name="solver")) for row in rows]
    assert [(each.name, each.reward) for each in found] == [("solver", 1.0), ("solver", 0.0)]
    steps = [step for each in found for step in each.steps]
    assert [(step.prompt_ids, step.response_ids, step.done) for step in steps] == [
        ([1, 2], [3, 4], False),
        ([1, 2, 3, 4, 5], [6, 7], True),
        ([1, 2, 3, 4, 8, 9], [10], True),
    ]
    assert [len(step.logprobs) for step in steps] == [2, 2, 1]


def test_sample_that_another_prompt_has_split_is_one_step() -> None:
    segments = [
        segment("a", None, [3, 4], finish="cut"),
        segment("b", "a", [5]),
        segment("c", "a", [6], sampled=False),
        segment("d", "c", [7]),
    ]
    first, second = session_rows(session(segments, ["b", "d"]))
    assert [step["response_ids"] for step in first.rllm_trajectory()["steps"]] == [[3, 4, 5]]
    assert (first.num_turns, second.num_turns) == (1, 2)
    assert masks([first, second]) == [[1, 1, 1], [0, 0, 0, 1]]


def test_turns_without_context_in_between_are_steps_of_their_own() -> None:
    """The second turn continues the first one without its stop token."""
    segments = [
        segment("a", None, [3, 4], finish="cut"),
        segment("b", "a", [9]),
        segment("c", "a", [5, 9]),
    ]
    result = session(segments, ["b", "c"], num_hidden=1)
    for train_once in (False, True):
        row, end = session_rows(result, train_once=train_once)
        assert (row.turn_starts, row.num_turns, end.turn_starts) == ((0, 2), 2, (0,))
        steps = Trajectory(**row.rllm_trajectory()).steps
        assert [(step.prompt_ids, step.response_ids, step.done) for step in steps] == [
            ([1, 2], [3, 4], False),
            ([1, 2, 3, 4], [5, 9], True),
        ]
    [step] = Trajectory(**end.rllm_trajectory()).steps
    assert (step.prompt_ids, step.response_ids) == ([1, 2, 3, 4], [9])


def supported(*supports: Sequence[int]) -> SessionResult:
    """Two turns of two tokens and one, with a support for each token."""
    segments = [
        segment("a", None, [3, 4], support=supports[:2]),
        segment("b", "a", [6], sampled=False),
        segment("c", "b", [7], support=supports[2:]),
    ]
    return session(segments, ["c"], reward=1.0)


def test_rows_have_the_supports_of_their_tokens() -> None:
    [row] = session_rows(supported([3, 5], [4], EVERY))
    assert row.support is not None and len(row.support) == len(row.response_ids)
    assert [ids.tolist() for ids in row.support] == [[3, 5], [4], [*EVERY], [*EVERY]]
    [without] = session_rows(straight())
    assert without.support is None


@pytest.mark.parametrize(
    "convert",
    [
        lambda result: trl_output([result]),
        lambda result: session_rows(result)[0].verl_output(),
        lambda result: session_rows(result)[0].prime_rl_sample(env_name="sums"),
        lambda result: session_rows(result)[0].rllm_trajectory(),
    ],
)
def test_trainers_without_supports_refuse_tokens_of_truncated_distributions(
    convert: Callable[[SessionResult], object],
) -> None:
    with pytest.raises(ValueError, match="sampled from a part of the vocabulary"):
        convert(supported([3, 5], EVERY, EVERY))
    assert convert(supported(EVERY, EVERY, EVERY))
