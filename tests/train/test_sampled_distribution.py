"""Logprobs and gradients under the distribution that the responses were sampled from."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coppice.train import (
    LogitAdjustments,
    TrainingGroup,
    group_logprobs,
    grouped_backward,
    packed_logprobs,
    sampled_logprobs,
)
from coppice.train import sampled_distribution as module
from coppice.wire.columns.support import Support
from engine.sampling.support_encoding import encode_mask
from tests.train.models import VOCABULARY, error, random_group, tiny_model
from tests.train.naive import naive_logprobs, naive_token_logprobs
from tests.train.test_backward import SCHEDULES, found_gradients, naive_gradients
from tests.train.test_trees import random_tree

LENGTHS = (7, 0, 12, 1)
ADJUSTED = LogitAdjustments(
    logit_bias={3: 4.0, 96: -2.5},
    presence_penalty=0.7,
    frequency_penalty=-0.4,
    repetition_penalty=1.3,
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_VALUES", 5 * VOCABULARY)


def random_support(response: Tensor, seed: int, *, vocabulary: int = VOCABULARY) -> Support:
    """Random sets of very different sizes that include the token."""
    generator = np.random.default_rng(seed)
    rows = []
    for at, token in enumerate(response.tolist()):
        mask = generator.random(vocabulary) < (0.02, 0.5, 0.98, 1.1)[at % 4]
        mask[token] = True
        rows.append(encode_mask(mask))
    return Support(tuple(rows), vocabulary)


def with_support(group: Any) -> Any:
    supports = tuple(random_support(r, seed) for seed, r in enumerate(group.responses))
    return replace(group, support=supports)


def close(found: Tensor, exact: Tensor) -> bool:
    return torch.allclose(found, exact, rtol=0, atol=3e-5)


GROUPS = pytest.mark.parametrize(
    "group",
    [
        with_support(random_group(LENGTHS)),
        replace(random_group(LENGTHS), adjustments=ADJUSTED),
        replace(with_support(random_group(LENGTHS)), adjustments=ADJUSTED),
        replace(random_group(LENGTHS), adjustments=LogitAdjustments(logit_bias={5: 2.0})),
    ],
    ids=["support", "adjusted", "both", "bias"],
)


@GROUPS
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_the_naive_ones(group: TrainingGroup, temperature: float) -> None:
    model = tiny_model()
    exact = naive_logprobs(model, group, temperature=temperature).logprobs
    found = group_logprobs(model, group, temperature=temperature, pass_tokens=9)
    assert close(found.logprobs, exact)
    other = random_group((4, 2), seed=5)
    packed, plain = packed_logprobs(model, [group, other], temperature=temperature)
    assert close(packed.logprobs, exact)
    assert close(plain.logprobs, naive_logprobs(model, other, temperature=temperature).logprobs)


@GROUPS
def test_every_schedule_gives_the_naive_gradient(group: TrainingGroup) -> None:
    model = tiny_model()
    exact = naive_gradients(model, group)
    for schedule in SCHEDULES:
        found = found_gradients(model, group, schedule=schedule, pass_tokens=9)
        assert error(found, exact) < 1e-5, schedule


def test_gradient_passes_the_numerical_check() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, generator=generator, requires_grad=True)
    response = torch.randint(0, 11, (6,), generator=generator)
    support = random_support(response, 1, vocabulary=11)
    adjustments = LogitAdjustments(logit_bias={2: 1.5}, repetition_penalty=1.2)

    def logprobs(values: Tensor) -> Tensor:
        return sampled_logprobs(
            values,
            response,
            temperature=0.8,
            support=support,
            adjustments=adjustments,
            prompt=torch.tensor([1, 2]),
        )

    assert torch.autograd.gradcheck(logprobs, (logits,))


def test_trees_have_the_supports_and_penalties_of_their_segments() -> None:
    model = tiny_model()
    tree = replace(with_support(random_tree("deep")), adjustments=ADJUSTED)
    exact = naive_logprobs(model, tree).logprobs
    assert close(group_logprobs(model, tree).logprobs, exact)
    flat = tree.flattened()
    assert flat.support is not None
    assert [len(support) for support in flat.support] == list(flat.lengths)
    by_leaf = tree.by_leaf(group_logprobs(model, tree))
    assert close(by_leaf.logprobs, group_logprobs(model, flat).logprobs)


def test_tokens_outside_of_a_support_have_no_gradient() -> None:
    logits = torch.zeros(1, 8, requires_grad=True)
    support = Support((encode_mask(np.arange(8) < 3),), 8)
    sampled_logprobs(logits, torch.tensor([1]), support=support).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.allclose(logits.grad, torch.tensor([[-1, 2, -1, 0, 0, 0, 0, 0]]) / 3)


def test_logits_beyond_the_vocabulary_are_excluded() -> None:
    """Models pad their vocabulary; the server does not sample the padding."""
    logits = torch.randn(3, 10)
    support = Support((b"\x00",) * 3, 8)
    found = sampled_logprobs(logits, torch.tensor([1, 2, 7]), support=support)
    exact = logits[:, :8].log_softmax(-1)[torch.arange(3), torch.tensor([1, 2, 7])]
    assert close(found, exact)


def test_backward_holds_no_array_of_all_logits() -> None:
    num_tokens = 40
    logits = torch.randn(num_tokens, VOCABULARY, requires_grad=True)
    response = torch.randint(0, VOCABULARY, (num_tokens,))
    storages = {}

    def pack(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        found = sampled_logprobs(logits, response, support=random_support(response, 3))
    storages.pop(logits.untyped_storage().data_ptr(), None)
    assert sum(storages.values()) < logits.nbytes / 10
    found.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adjustments", [LogitAdjustments(), ADJUSTED])
def test_gradient_equals_the_dense_one(dtype: torch.dtype, adjustments: LogitAdjustments) -> None:
    group = with_support(random_group((17,), seed=4))
    group = replace(group, adjustments=adjustments)
    logits = torch.randn(17, VOCABULARY, dtype=dtype, generator=torch.Generator().manual_seed(2))
    weights = torch.linspace(-1, 2, 17, dtype=torch.float64)

    def gradient(compute: Any, values: Tensor) -> Tensor:
        values.requires_grad_()
        (compute(values) * weights).sum().backward()
        assert values.grad is not None and values.grad.dtype == values.dtype
        return values.grad.double()

    [response], [support] = group.responses, group.support
    given: Any = {"support": support, "adjustments": adjustments, "prompt": group.prompt}
    found = gradient(
        lambda values: sampled_logprobs(values, response, temperature=0.8, **given), logits.clone()
    )
    exact = gradient(lambda values: naive_token_logprobs(group, values, 0.8), logits.double())
    assert (
        error({"": found}, {"": exact}) < {64: 1e-14, 32: 1e-6, 16: 1e-2}[torch.finfo(dtype).bits]
    )


def test_listed_supports_read_only_their_logits() -> None:
    """Logits of other ids may be NaN, and neither the value nor the gradient depends on them."""
    logits = torch.full((3, 1000), torch.nan)
    logits[:, 5:9] = torch.arange(4.0)
    logits.requires_grad_()
    rows = (encode_mask(np.isin(np.arange(1000), [5, 6, 7, 8])),) * 3
    found = sampled_logprobs(logits, torch.tensor([5, 7, 8]), support=Support(rows, 1000))
    found.sum().backward()  # type: ignore[no-untyped-call]
    exact = torch.arange(4.0).log_softmax(0)[[0, 2, 3]]
    assert close(found, exact)
    assert logits.grad is not None and not logits.grad[:, 9:].any()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("ids", [[1, 2], list(range(400)), list(range(990))])
def test_tokens_outside_of_their_supports_are_refused(ids: list[int]) -> None:
    row = encode_mask(np.isin(np.arange(1000), ids))
    with pytest.raises(ValueError, match="not in its support"):
        sampled_logprobs(torch.zeros(1, 1000), torch.tensor([995]), support=Support((row,), 1000))


def test_inconsistent_arguments_are_refused() -> None:
    logits, response = torch.randn(2, 8), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="number of supports"):
        sampled_logprobs(logits, response, support=Support((b"\x00",), 8))
    with pytest.raises(ValueError, match="vocabulary of 9"):
        sampled_logprobs(logits, response, support=Support((b"\x00",) * 2, 9))
    with pytest.raises(ValueError, match="needs the prompt"):
        sampled_logprobs(logits, response, adjustments=LogitAdjustments(repetition_penalty=2.0))
    group = random_group((2, 3))
    with pytest.raises(ValueError, match="number of supports"):
        replace(group, support=(Support((b"\x00",), 8),) * 2)


def test_whole_vocabulary_as_support_changes_nothing() -> None:
    model, group = tiny_model(), random_group(LENGTHS)
    whole = tuple(Support((b"\x00",) * length, VOCABULARY) for length in group.lengths)
    loss = lambda rows: rows.logprobs.sum()  # noqa: E731
    plain = grouped_backward(model, group, loss)
    assert grouped_backward(model, replace(group, support=whole), loss).loss == pytest.approx(
        plain.loss, rel=1e-6
    )
