"""Supports from a real engine: the returned logprobs are normalised over exactly these sets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.train import LogitAdjustments, sampled_logprobs
from coppice.wire.columns.support import Support, decode_ids, decode_mask
from engine.sampling.step_supports import SUPPORT_ARG
from engine.speculation.counters import COUNTERS
from engine.speculation.request_table import GROUP_ARG
from tests.engine.random_models import VOCAB
from tests.engine.stepped_engine import Answer, LiveEngine

pytestmark = pytest.mark.engine

PROMPT = [5, 7, 11, 13]
NUM_TOKENS = 24
ALLOWED = list(range(3, VOCAB, 4))
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "none": {},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "both": {"top_p": 0.9, "top_k": 20, "temperature": 1.3},
    "allowed": {"allowed_token_ids": ALLOWED},
    "bad_words": {"_bad_words_token_ids": [[4], [9]]},
    "penalties": {
        "presence_penalty": 0.6,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.4,
        "top_k": 30,
    },
    "min_p": {"min_p": 0.6},
    "bias": {"logit_bias": {4: 3.5, 9: -2.0}, "top_p": 0.9},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": [2, 3], "ignore_eos": False},
}


def submit(engine: LiveEngine, group: str, **sampling: Any) -> str:
    params: dict[str, Any] = {
        "temperature": 1.0,
        "max_tokens": NUM_TOKENS,
        "extra_args": {SUPPORT_ARG: True, GROUP_ARG: group},
    }
    params |= sampling
    return engine.submit(PROMPT, **params)


def verifies_drafts(engine: LiveEngine) -> bool:
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    return hasattr(runner, "rejection_sampler")


def masks(answer: Answer) -> torch.Tensor:
    return torch.from_numpy(np.stack([decode_mask(row, VOCAB) for row in answer.support]))


def assert_renormalised(folder: Path, answer: Answer, sampling: dict[str, Any]) -> None:
    """The reference's logits, processed by the trainer, give the returned logprobs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert len(answer.support) == len(answer.token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + answer.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    names = LogitAdjustments.__dataclass_fields__.keys() & sampling.keys()
    taken = sampled_logprobs(
        logits.double(),
        torch.tensor(answer.token_ids),
        temperature=sampling.get("temperature") or 1.0,
        support=Support(tuple(answer.support), VOCAB),
        adjustments=LogitAdjustments(**{name: sampling[name] for name in names}),
        prompt=torch.tensor(PROMPT),
    )
    assert answer.logprobs == pytest.approx(taken.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_logprobs_are_normalised_over_the_supports(
    engine: LiveEngine, models: dict[str, Path], name: str
) -> None:
    constraint = CONSTRAINTS[name]
    # A sample with one of these gets no drafts.
    has_drafts = verifies_drafts(engine) and name not in ("min_p", "bias", "min_tokens")
    before = sum(COUNTERS.read()["drafted"].values())
    names = [submit(engine, name, **constraint) for _ in range(6)]
    for answer in engine.finish(*names):
        assert_renormalised(models["v7"], answer, constraint)
    assert (sum(COUNTERS.read()["drafted"].values()) > before) == has_drafts


def test_supports_are_the_sets_of_the_constraints(engine: LiveEngine) -> None:
    [top_k] = engine.finish(submit(engine, "k", top_k=5))
    assert [len(decode_ids(row, VOCAB)) for row in top_k.support] == [5] * NUM_TOKENS
    [allowed] = engine.finish(submit(engine, "a", allowed_token_ids=ALLOWED))
    assert {tuple(decode_ids(row, VOCAB).tolist()) for row in allowed.support} == {tuple(ALLOWED)}
    [bad] = engine.finish(submit(engine, "b", _bad_words_token_ids=[[4], [9]]))
    assert not masks(bad)[:, [4, 9]].any()
    [waiting] = engine.finish(submit(engine, "m", **CONSTRAINTS["min_tokens"]))
    assert not masks(waiting)[:8, [2, 3]].any()
    assert masks(waiting)[8:].all()


def test_only_requests_that_ask_get_supports(engine: LiveEngine) -> None:
    asking = submit(engine, "g", top_p=0.9)
    other = submit(engine, "g", top_p=0.9, extra_args={GROUP_ARG: "g"})
    answers = engine.finish(asking, other)
    assert [len(answer.support) for answer in answers] == [NUM_TOKENS, 0]


def test_supports_follow_the_weights_of_each_token(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    """The prompt's KV is computed again, so both versions can be compared with a reference."""
    names = [submit(engine, "swap", top_p=0.8, max_tokens=60) for _ in range(4)]
    engine.step(12)
    engine.swap(models["v8"], recompute=True)
    for answer in engine.finish(*names):
        for span in answer.versions:
            part = Answer(
                token_ids=answer.token_ids[: span.end],
                logprobs=answer.logprobs[: span.end],
                versions=[],
                num_cached_tokens=0,
                support=answer.support[: span.end],
            )
            assert_span(models[span.version], part, span.start)
        assert len(answer.versions) == 2
    engine.swap(models["v7"])


def assert_span(folder: Path, answer: Answer, start: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + answer.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = logits.double().masked_fill(~masks(answer), -torch.inf).log_softmax(-1)
    taken = logprobs.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert answer.logprobs[start:] == pytest.approx(taken[start:].tolist(), abs=1e-4)


def test_aborted_sample_has_a_support_per_token(engine: LiveEngine) -> None:
    name = submit(engine, "abort", top_k=3, max_tokens=60)
    engine.step(9)
    engine.abort(name)
    engine.step()
    answers = engine.finish(submit(engine, "after", top_k=3))
    assert len(answers[0].support) == NUM_TOKENS
