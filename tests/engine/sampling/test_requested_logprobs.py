"""Given and raw logprobs from a real engine, against teacher forcing with Transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.wire.columns.support import decode_mask
from engine.sampling.requested_logprobs import LogprobValues, RequestedLogprobs
from engine.sampling.step_supports import SUPPORT_ARG
from engine.speculation.counters import COUNTERS
from engine.speculation.request_table import GROUP_ARG
from tests.engine.random_models import VOCAB
from tests.engine.stepped_engine import Answer, LiveEngine

pytestmark = pytest.mark.engine

PROMPT, NUM_TOKENS = [5, 7, 11, 13], 24
GIVEN = (3, 0, VOCAB - 1, 3)
PROCESSED, RAW = RequestedLogprobs(given=GIVEN), RequestedLogprobs(given=GIVEN, num_raw=6)
CONTROLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "truncated": {"temperature": 0.7, "top_k": 8, "top_p": 0.9},
    "allowed": {"allowed_token_ids": [3, 9, 20, 21, 22]},
    "penalties": {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {3: 2.0, 9: -1.0}},
}


def submit(engine: LiveEngine, group: str, wanted: RequestedLogprobs, **sampling: Any) -> str:
    extra = {GROUP_ARG: group, SUPPORT_ARG: True, **wanted.to_extra_args()}
    params = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "extra_args": extra, **sampling}
    return engine.submit(PROMPT, **params)


def reference(model: Path, answer: Answer) -> torch.Tensor:
    """Logits at the positions of a response, given its tokens."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = network(torch.tensor([PROMPT + answer.token_ids])).logits
    return logits[0, len(PROMPT) - 1 : -1].double()


def values(answer: Answer, wanted: RequestedLogprobs) -> LogprobValues:
    assert len(answer.support) == len(answer.token_ids)
    return wanted.split(answer.support)


@pytest.mark.parametrize("name", CONTROLS)
def test_raw_logprobs_are_those_of_the_model(
    engine: LiveEngine, models: dict[str, Path], name: str
) -> None:
    names = [submit(engine, name, RAW, **CONTROLS[name]) for _ in range(4)]
    for answer in engine.finish(*names):
        found, expected = values(answer, RAW), reference(models["v7"], answer).log_softmax(-1)
        own = expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert found.raw == pytest.approx(own.numpy(), abs=1e-4)
        assert found.given == pytest.approx(expected[:, list(GIVEN)].numpy(), abs=1e-4)
        assert found.raw_top == pytest.approx(expected.topk(6).values.numpy(), abs=1e-4)
        at_top = expected.gather(1, torch.tensor(found.raw_top_ids.tolist()))
        assert found.raw_top == pytest.approx(at_top.numpy(), abs=1e-4)
        assert len(found.supports) == NUM_TOKENS
        if name == "plain":
            assert answer.logprobs == pytest.approx(own.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["plain", "greedy", "truncated", "allowed"])
def test_given_logprobs_are_those_of_the_sampled_distribution(
    engine: LiveEngine, models: dict[str, Path], name: str
) -> None:
    before = sum(COUNTERS.read()["drafted"].values())
    names = [submit(engine, name, PROCESSED, **CONTROLS[name]) for _ in range(4)]
    for answer in engine.finish(*names):
        found = values(answer, PROCESSED)
        kept = torch.from_numpy(np.stack([decode_mask(row, VOCAB) for row in found.supports]))
        logits = reference(models["v7"], answer) / (CONTROLS[name].get("temperature") or 1.0)
        expected = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)[:, list(GIVEN)]
        assert found.given == pytest.approx(expected.numpy(), abs=1e-4)
        assert found.raw is None
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    has_drafts = hasattr(runner, "rejection_sampler")
    assert (sum(COUNTERS.read()["drafted"].values()) > before) == has_drafts


def test_requests_of_one_step_return_what_each_wants(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    one = RequestedLogprobs(given=(7,))
    wanted = [RAW, one, PROCESSED, RequestedLogprobs(num_raw=0), RequestedLogprobs(), one]
    names = [submit(engine, "mixed", each) for each in wanted]
    for each, answer in zip(wanted, engine.finish(*names), strict=True):
        found, expected = values(answer, each), reference(models["v7"], answer).log_softmax(-1)
        assert found.given == pytest.approx(expected[:, list(each.given)].numpy(), abs=1e-4)
        assert found.raw_top.shape == (NUM_TOKENS, each.num_raw or 0)
        assert (found.raw is None) == (each.num_raw is None)
        assert all(decode_mask(row, VOCAB).all() for row in found.supports)
