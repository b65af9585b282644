"""Advance of a generator: equal to the draws of vLLM's sampler for CPUs, one per token."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from engine.sampling.request_hooks import DRAWN_TOKENS_ARG, RANDOM_SEEDS, skip_drawn_tokens

NUM_NEXT = 20


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def drawn(source: torch.Generator, number: int) -> list[int]:
    """Numbers that vLLM's sampler draws for `number` tokens of one sample."""
    draws = (
        torch.randint(0, 2**31, (1,), generator=source, dtype=torch.long) for _ in range(number)
    )
    return [int(draw) for draw in draws]


@pytest.mark.parametrize("number", [1, 2, 15, 16, 17, 1000, 4099])
def test_next_draws_are_those_after_the_skipped_tokens(number: int) -> None:
    params = SimpleNamespace(extra_args={DRAWN_TOKENS_ARG: number})
    state = SimpleNamespace(generator=generator(), sampling_params=params)
    skip_drawn_tokens(state)
    assert drawn(state.generator, NUM_NEXT) == drawn(generator(), number + NUM_NEXT)[number:]


@pytest.mark.parametrize("extra_args", [None, {}, {DRAWN_TOKENS_ARG: 0}])
def test_other_samples_skip_nothing(extra_args: dict[str, int] | None) -> None:
    params = SimpleNamespace(extra_args=extra_args)
    state = SimpleNamespace(generator=generator(), sampling_params=params)
    skip_drawn_tokens(state)
    assert drawn(state.generator, NUM_NEXT) == drawn(generator(), NUM_NEXT)


def test_bound_of_the_draws_is_that_of_the_sampler() -> None:
    assert RANDOM_SEEDS == 2**31
    source = inspect.getsource(TopKTopPSampler.forward_cpu)
    assert (
        "torch.randint(\n                0, 2**31, (1,), generator=gen, dtype=torch.long" in source
    )
