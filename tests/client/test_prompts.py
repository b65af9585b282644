from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from coppice import GroupRequest, Message, Prompt
from coppice.prompts import groups_of

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
MESSAGES = [Message(role="system", content="Be brief."), Message(role="user", content="Hello")]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", Prompt(text="hello")),
        ([1, 2, 3], Prompt(token_ids=[1, 2, 3])),
        ((1, 2, 3), Prompt(token_ids=[1, 2, 3])),
        (range(1, 4), Prompt(token_ids=[1, 2, 3])),
        (np.array([1, 2, 3], dtype=np.int32), Prompt(token_ids=[1, 2, 3])),
        ([np.int64(1), np.int64(2)], Prompt(token_ids=[1, 2])),
        (TURNS, Prompt(messages=MESSAGES)),
        (MESSAGES, Prompt(messages=MESSAGES)),
        (Prompt(text="hello"), Prompt(text="hello")),
    ],
)
def test_prompt_types_are_converted(prompt: Any, expected: Prompt) -> None:
    assert groups_of([prompt], n=8, seed=3) == [GroupRequest(prompt=expected, n=8, seed=3)]


def test_tensor_of_token_ids_is_a_prompt() -> None:
    torch = pytest.importorskip("torch")
    assert groups_of([torch.tensor([1, 2])])[0].prompt == Prompt(token_ids=[1, 2])


def test_rows_of_an_array_are_prompts() -> None:
    rows: Any = np.array([[1, 2], [3, 4]])
    assert [group.prompt.token_ids for group in groups_of(rows)] == [[1, 2], [3, 4]]


def test_prompts_may_come_from_a_generator() -> None:
    def prompts() -> Iterator[str]:
        yield "a"
        yield "b"

    assert [group.prompt.text for group in groups_of(prompts())] == ["a", "b"]


def test_group_is_sent_unchanged() -> None:
    group = GroupRequest(prompt=Prompt(text="hello"), n=2, id="mine", seed=99)
    assert groups_of([group, "other"], n=8, seed=3) == [
        group,
        GroupRequest(prompt=Prompt(text="other"), n=8, seed=4),
    ]


@pytest.mark.parametrize(
    "single",
    ["hello", b"hello", TURNS[0], MESSAGES[0], Prompt(text="x"), [1, 2, 3], TURNS, MESSAGES],
)
def test_single_prompt_is_refused_with_advice(single: Any) -> None:
    with pytest.raises(TypeError, match="put a single prompt into a list"):
        groups_of(single)


@pytest.mark.parametrize("prompt", [None, 1.5, b"bytes", object()])
def test_invalid_prompt_is_named_with_its_index(prompt: Any) -> None:
    with pytest.raises(TypeError, match=r"prompts\[1\] is "):
        groups_of(["fine", prompt])


@pytest.mark.parametrize("prompt", [[1.0, 2.0], [1, "a"], [[1, 2]], np.array([0.5])])
def test_token_ids_must_be_integers(prompt: Any) -> None:
    with pytest.raises(TypeError, match=r"prompts\[0\] contains "):
        groups_of([prompt])


@pytest.mark.parametrize(
    "prompt", ["", [], [-1], [2**31], [{"role": "user"}], [{"role": "user", "content": 1}]]
)
def test_prompt_out_of_bounds_is_a_value_error(prompt: Any) -> None:
    with pytest.raises(ValueError):
        groups_of([prompt])
