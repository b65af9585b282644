"""The gradient of a group equals that of the padded batch, under every schedule."""

from typing import Any

import pytest
import torch

from coppice.train import (
    Schedule,
    TrainingGroup,
    compute_prompt_kv,
    group_logprobs,
    grouped_backward,
)
from coppice.train.attention.huggingface_models import attending
from coppice.train.group_logprobs import no_grad_layers, response_logprobs
from tests.train.models import Gradients, error, gradients, random_group, random_loss, tiny_model
from tests.train.naive import naive_backward

pytestmark = pytest.mark.slow

SCHEDULES: list[Schedule] = ["kept", "recomputed", "injected", "packed"]
TWO_PHASES: list[Schedule] = ["recomputed", "injected"]


def naive_gradients(model: Any, group: TrainingGroup) -> Gradients:
    naive_backward(model, group, random_loss(group))
    return gradients(model)


def found_gradients(model: Any, group: TrainingGroup, **options: Any) -> Gradients:
    grouped_backward(model, group, random_loss(group), **options)
    return gradients(model)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_every_schedule_gives_the_padded_gradient(family: str, kv_heads: int, tied: bool) -> None:
    model, group = tiny_model(family, kv_heads=kv_heads, tied=tied), random_group()
    exact = naive_gradients(model, group)
    for schedule in SCHEDULES:
        found = found_gradients(model, group, schedule=schedule, pass_tokens=100)
        assert error(found, exact) < 1e-5, schedule


@pytest.mark.parametrize("pass_tokens", [1, 48, 100, 200, 1000])
def test_every_pass_size_gives_the_padded_gradient(pass_tokens: int) -> None:
    model, group = tiny_model(), random_group()
    exact = naive_gradients(model, group)
    found = found_gradients(model, group, schedule="kept", pass_tokens=pass_tokens)
    assert error(found, exact) < 1e-5


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prompt_tokens", [1, 2, 3])
def test_short_prompts_and_empty_responses_are_supported(
    prompt_tokens: int, schedule: Schedule
) -> None:
    model = tiny_model()
    group = random_group((0, 3, 3, 0, 7, 0), prompt_tokens=prompt_tokens)
    exact = naive_gradients(model, group)
    found = found_gradients(model, group, schedule=schedule, pass_tokens=3)
    assert error(found, exact) < 1e-5


def test_group_without_tokens_has_no_gradient() -> None:
    model, group = tiny_model(), random_group((0, 0))
    report = grouped_backward(model, group, random_loss(random_group((1, 1))))
    assert report.loss == 0
    assert gradients(model) == {}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_accumulate(schedule: Schedule) -> None:
    model, group = tiny_model(), random_group()
    exact = naive_gradients(model, group)
    for _ in range(2):
        grouped_backward(model, group, random_loss(group), schedule=schedule)
    twice = gradients(model)
    assert error({name: grad / 2 for name, grad in twice.items()}, exact) < 1e-5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_equals_that_of_the_padded_batch(schedule: Schedule) -> None:
    model, group = tiny_model(), random_group()
    exact = naive_backward(model, group, random_loss(group))
    report = grouped_backward(model, group, random_loss(group), schedule=schedule, pass_tokens=50)
    assert report.loss == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bfloat16_is_as_close_to_float32_as_the_padded_gradient(
    schedule: Schedule, record_property: Any
) -> None:
    group = random_group()
    model = tiny_model(dtype=torch.bfloat16)
    exact = naive_gradients(tiny_model().to(torch.bfloat16).float(), group)
    naive = error(naive_gradients(model, group), exact)
    found = error(found_gradients(model, group, schedule=schedule, pass_tokens=100), exact)
    record_property("naive", naive)
    record_property("found", found)
    assert found < 1.25 * naive


@pytest.mark.parametrize("schedule", TWO_PHASES)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_gradient_with_given_prompt_kv_is_exact(family: str, schedule: Schedule) -> None:
    model, group = tiny_model(family), random_group()
    exact = naive_gradients(model, group)
    prompt_kv = compute_prompt_kv(model, group)
    report = grouped_backward(
        model, group, random_loss(group), prompt_kv=prompt_kv, schedule=schedule, pass_tokens=100
    )
    assert error(gradients(model), exact) < 1e-5
    assert report.num_prompt_forwards == 1
    assert report.prompt_kv_error is not None and report.prompt_kv_error < 1e-6


def test_prompt_kv_of_other_weights_shows_in_the_report() -> None:
    model, group = tiny_model(), random_group()
    stale = compute_prompt_kv(tiny_model(seed=1), group)
    report = grouped_backward(model, group, random_loss(group), prompt_kv=stale)
    assert report.prompt_kv_error is not None and report.prompt_kv_error > 0.5


def test_dropping_the_gradient_of_the_prompt_is_a_large_error() -> None:
    """Detaching the prompt would save time and optimize another objective."""
    model, group = tiny_model(), random_group()
    exact = naive_gradients(model, group)
    grouped_backward(model, group, random_loss(group), schedule="recomputed")
    assert error(gradients(model), exact) < 1e-5
    assert error(without_the_prompts(model, group), exact) > 0.5


def without_the_prompts(model: Any, group: TrainingGroup) -> Gradients:
    with attending(model):
        prompt = no_grad_layers(model, group, None)
        rows = response_logprobs(model, group, range(len(group.responses)), prompt, 1.0)
        random_loss(group)(rows).backward()  # type: ignore[no-untyped-call]
    return gradients(model)


@pytest.mark.parametrize(
    ("schedule", "given", "num_forwards"),
    [
        ("kept", False, 1),
        ("recomputed", False, 2),
        ("recomputed", True, 1),
        ("injected", False, 2),
        ("injected", True, 1),
        ("packed", False, 1),
    ],
)
def test_prompt_forwards_are_counted_in_the_report(
    schedule: Schedule, given: bool, num_forwards: int
) -> None:
    model, group = tiny_model(), random_group()
    prompt_kv = compute_prompt_kv(model, group) if given else None
    computed = count_tokens(model)
    report = grouped_backward(
        model, group, random_loss(group), schedule=schedule, prompt_kv=prompt_kv, pass_tokens=100
    )
    assert report.num_prompt_forwards == num_forwards
    assert sum(computed) == num_forwards * (len(group.prompt) - 1) + group.num_tokens


def test_logprobs_prefill_the_prompt_once_or_not_at_all() -> None:
    model, group = tiny_model(), random_group()
    prompt_kv = compute_prompt_kv(model, group)
    computed = count_tokens(model)
    group_logprobs(model, group, pass_tokens=100)
    assert sum(computed) == len(group.prompt) - 1 + group.num_tokens
    computed.clear()
    group_logprobs(model, group, prompt_kv, pass_tokens=100)
    assert sum(computed) == group.num_tokens


def count_tokens(model: Any) -> list[int]:
    """A list that grows by the number of tokens of every forward."""
    computed: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(
        lambda module, inputs: computed.append(inputs[0].numel())
    )
    return computed
