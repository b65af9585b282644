"""Texts of other engines in the draft store of an engine, and the calls that carry them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.speculation import shared_texts
from engine.speculation.counters import COUNTERS
from engine.speculation.drafting import CallTexts, add_texts
from engine.speculation.shared_texts import MAX_CALL_TOKENS, MIN_TEXT_TOKENS, calls
from engine.types import DraftTexts
from kernels.draft_index.store import is_built
from tests.engine.random_models import make_models
from tests.engine.speculation.drafting_engine import drafting_engine, in_group
from tests.kernels.draft_index.reference import ReferenceStore

needs_library = pytest.mark.skipif(not is_built(), reason="the draft store was not built")


def texts(prompt: list[int], *responses: list[int], age: int = 0) -> DraftTexts:
    arrays = [np.array(response, np.int32) for response in responses]
    return DraftTexts(prompt=np.array(prompt, np.int32), responses=arrays, age=age)


def test_calls_have_all_responses_and_a_bounded_number_of_tokens() -> None:
    given = [texts([number], [1] * 3000, [2] * 3000, age=number) for number in range(5)]
    given.append(texts([9], [3] * (2 * MAX_CALL_TOKENS)))
    made = list(calls(given))
    sizes = [
        sum(len(prompt + b"".join(responses)) // 4 for prompt, responses, _ in call)
        for call in made
    ]
    assert max(sizes[:-1]) <= MAX_CALL_TOKENS and len(made[-1]) == 1
    found = [
        (np.frombuffer(prompt, np.int32).tolist(), len(response) // 4, age)
        for call in made
        for prompt, responses, age in call
        for response in responses
    ]
    assert found == [
        (one.prompt.tolist(), len(response), one.age) for one in given for response in one.responses
    ]


def test_calls_have_a_bounded_number_of_short_responses() -> None:
    made = [len(responses) for [(_, responses, _)] in calls([texts([1], *[[2]] * 1000)])]
    assert sum(made) == 1000 and max(made) == MAX_CALL_TOKENS // MIN_TEXT_TOKENS


def test_long_prompt_is_passed_once_for_its_responses() -> None:
    [call] = calls([texts([1] * 2 * MAX_CALL_TOKENS, *[[2] * 50] * 64)])
    [(prompt, responses, _)] = call
    assert len(prompt) == 8 * MAX_CALL_TOKENS and len(responses) == 64


def engine_of(vocabulary: dict[str, int], **config: Any) -> Any:
    """The parts of vLLM's engine that identify its model and vocabulary."""
    hf_config = SimpleNamespace(to_dict=lambda: {"model_type": "tiny", **config})
    model_config = SimpleNamespace(hf_config=hf_config)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model_config),
        get_tokenizer=lambda: SimpleNamespace(get_vocab=lambda: vocabulary),
    )


def test_labels_depend_on_the_model_and_its_vocabulary_but_not_on_its_path() -> None:
    one = shared_texts._label(engine_of({"a": 0, "b": 1}, _name_or_path="/one"))
    assert one == shared_texts._label(engine_of({"b": 1, "a": 0}, _name_or_path="/other"))
    others = [engine_of({"a": 1, "b": 0}), engine_of({"a": 0, "b": 1}, hidden_size=8)]
    assert len({one, *map(shared_texts._label, others)}) == 3


def arguments(*given: DraftTexts) -> CallTexts:
    [call] = calls(given)
    return call


def test_texts_that_the_store_refuses_are_not_counted() -> None:
    store = ReferenceStore(max_bytes=2**20)
    invalid = texts([1, 2], [7, -8])
    assert add_texts(store, arguments(texts([1, 2], [7, 8]), invalid)) == 1
    assert store.num_tokens == 2 + 2 + 2


@pytest.mark.exhaustive
@pytest.mark.engine
@needs_library
def test_first_sample_is_drafted_from_texts_of_another_engine(tmp_path: Path) -> None:
    model = make_models(tmp_path / "models", tied=True)["v7"]
    prompt, num_tokens = [5, 7, 11, 13], 40
    with drafting_engine(model, tmp_path / "one") as (engine, _):
        [sampled] = engine.finish(engine.submit(prompt, max_tokens=num_tokens, **in_group("a")))
    with drafting_engine(model, tmp_path / "other") as (engine, _):
        call = arguments(texts(prompt, sampled.token_ids))
        assert sum(engine.rpc("coppice_add_drafts", call)) == 1
        before = COUNTERS.read()["accepted"]["prompt"]
        [answer] = engine.finish(engine.submit(prompt, max_tokens=num_tokens, **in_group("b")))
        assert COUNTERS.read()["accepted"]["prompt"] - before >= num_tokens // 2
    assert answer.token_ids == sampled.token_ids
