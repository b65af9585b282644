"""Sampling controls next to drafts: the same tokens and log-probabilities as without drafts."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.requests.request_params import sampling_params
from engine.sampling import request_hooks
from engine.speculation.custom_class_proposer import Proposer
from engine.types.samples import SampleRequest, Sampling, StructuredOutputs
from tests.engine.seedling import MODEL
from tests.engine.speculation.drafting_engine import drafting_engine
from tests.engine.stepped_engine import Answer, LiveEngine

pytestmark = pytest.mark.engine

PROMPT = list(range(30, 60))
IDS = itertools.count()
Drafting = tuple[LiveEngine, Proposer]
CONTROLS: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {20: 30.0, 21: 29.5}},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(15, 40))},
    "penalties": {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "bad_words": {"bad_words": ("1", "2", "an")},
    "min_tokens": {"min_tokens": 30},
    "regex": {"structured_outputs": StructuredOutputs(regex="([0-9][a-f]){40}")},
}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    request_hooks.install()
    folder = tmp_path_factory.mktemp("kept")
    with drafting_engine(MODEL, folder, skip_tokenizer_init=False) as drafting:
        yield drafting


def run(engine: LiveEngine, request: SampleRequest) -> Answer:
    [answer] = engine.finish(submit(engine, request))
    return answer


def submit(engine: LiveEngine, request: SampleRequest) -> str:
    name = f"controlled-{next(IDS)}"
    prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    engine._llm.llm_engine.add_request(name, prompt, sampling_params(request, 512))
    return name


@pytest.mark.parametrize("control", CONTROLS)
def test_controlled_samples_are_the_same_with_drafts(drafting: Drafting, control: str) -> None:
    engine, _ = drafting
    sampling = Sampling(max_tokens=40, temperature=0.0, **CONTROLS[control])
    request = SampleRequest(
        id="", prompt_token_ids=PROMPT, sampling=sampling, group=control, speculation=False
    )
    plain = run(engine, request)
    drafted = replace(request, speculation=True)
    names = [submit(engine, drafted) for _ in range(2)]
    names.append(
        submit(engine, replace(drafted, sampling=Sampling(max_tokens=40, temperature=0.0)))
    )
    for answer in engine.finish(*names)[:2]:
        assert answer.token_ids == plain.token_ids
        assert answer.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
    number = len(plain.token_ids) // 2
    resumed = replace(
        drafted,
        prompt_token_ids=[*PROMPT, *plain.token_ids[:number]],
        num_prior_tokens=number,
        sampling=sampling.after(number, 40 - number),
    )
    assert run(engine, resumed).token_ids == plain.token_ids[number:]


def test_min_p_is_applied_in_an_engine_that_drafts(drafting: Drafting) -> None:
    """At 1 only the most probable token is left."""
    engine, _ = drafting
    greedy = Sampling(max_tokens=20, temperature=0.0)
    request = SampleRequest(id="", prompt_token_ids=PROMPT, sampling=greedy, group="min_p")
    certain = replace(request, sampling=Sampling(max_tokens=20, temperature=1.0, min_p=1.0))
    answer = run(engine, certain)
    assert answer.token_ids == run(engine, request).token_ids
    assert answer.logprobs == pytest.approx([0.0] * len(answer.logprobs), abs=1e-6)
