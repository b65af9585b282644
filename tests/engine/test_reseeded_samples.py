"""Seed of a continued sample whose random stream cannot be advanced, as on a GPU."""

from types import SimpleNamespace

import torch

from engine.sampling.request_hooks import DRAWN_TOKENS_ARG, skip_drawn_tokens


class OtherDevice:
    """Generator of a device other than a CPU."""

    def __init__(self, seed: int) -> None:
        self.device = torch.device("cuda")
        self.seed = seed

    def manual_seed(self, seed: int) -> None:
        self.seed = seed


def seed_after(num_drawn: int, seed: int = 3) -> int:
    params = SimpleNamespace(seed=seed, extra_args={DRAWN_TOKENS_ARG: num_drawn})
    generator = OtherDevice(seed)
    skip_drawn_tokens(SimpleNamespace(generator=generator, sampling_params=params))
    return generator.seed


def test_numbers_of_the_first_run_are_not_repeated() -> None:
    seeds = [seed_after(number, seed) for seed in (3, 4) for number in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seed_is_the_same_on_each_rank() -> None:
    assert seed_after(5) == seed_after(5)


def test_sample_without_drawn_tokens_keeps_its_seed() -> None:
    assert seed_after(0) == 3
