"""TRL's mixin and sampling parameters, without TRL: a trainer needs only their attributes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from coppice import Support, Unsupported
from coppice.integrations.trl import RolloutFunc, SupportReplay, Supports
from engine.sampling.support_encoding import encode_mask
from tests.train.models import VOCABULARY, tiny_model

PROMPT, COMPLETION = [3, 7, 11], [7, 20, 20]
ALLOWED = np.arange(VOCABULARY) % 9 != 1
PENALTY, TEMPERATURE = 1.4, 0.7


class Trainer(SupportReplay):
    def __init__(self, **args: Any) -> None:
        self.temperature = TEMPERATURE
        neutral = {"min_p": None, "repetition_penalty": 1.0, "top_p": 0.9, "top_k": 0}
        lengths = {"max_completion_length": 4, "temperature": TEMPERATURE}
        self.args = SimpleNamespace(**{**neutral, **lengths, **args})
        supports = Supports()
        support = Support((encode_mask(ALLOWED),) * len(COMPLETION), VOCABULARY)
        sample: Any = SimpleNamespace(token_ids=np.array(COMPLETION), support=support)
        supports.replace([PROMPT], [sample])
        self.rollout_func: Any = SimpleNamespace(supports=supports)


def sampling(trainer: Any, *, return_support: bool) -> dict[str, Any]:
    rollouts: Any = None
    return RolloutFunc(rollouts, return_support=return_support)._sampling(trainer)


def test_logprobs_have_the_support_and_the_repetition_penalty() -> None:
    model = tiny_model()
    ids = torch.tensor([[0, *PROMPT, *COMPLETION, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0]])
    trainer = Trainer(repetition_penalty=PENALTY)
    found, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 4)
    logits = model(input_ids=ids, attention_mask=mask).logits[0]
    for at, token in enumerate(COMPLETION):
        values = logits[3 + at].detach().clone()
        for seen in {*PROMPT, *COMPLETION[:at]}:
            value = values[seen]
            values[seen] = value / PENALTY if value > 0 else value * PENALTY
        values[torch.from_numpy(~ALLOWED)] = -torch.inf
        expected = (values / TEMPERATURE).log_softmax(-1)[token]
        torch.testing.assert_close(found[0, at].detach(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("changed", [{"min_p": 0.1}, {"repetition_penalty": 1.2}])
def test_parameters_that_the_mixin_replays_are_sent(changed: dict[str, float]) -> None:
    found = sampling(Trainer(**changed), return_support=True)
    assert found.items() >= {**changed, "top_p": 0.9, "max_tokens": 4}.items()
    assert not {"min_p", "repetition_penalty"} & (found.keys() - changed.keys())


@pytest.mark.parametrize("changed", [{"min_p": 0.1}, {"repetition_penalty": 1.2}])
def test_other_trainers_cannot_change_the_distribution(changed: dict[str, float]) -> None:
    plain = SimpleNamespace(args=Trainer(**changed).args)
    for trainer, return_support in ((plain, True), (Trainer(**changed), False)):
        with pytest.raises(Unsupported, match="SupportReplay: TRL's logprobs are not those"):
            sampling(trainer, return_support=return_support)
    assert "min_p" not in sampling(SimpleNamespace(args=Trainer().args), return_support=False)
