"""Batches that the engines of a run sample. Imports neither torch nor vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Groups of samples of one prompt each, with their numbers of tokens.

    `streams`: samples have `on_tokens`. `pairs`: samples are greedy, and the second one of each
    group is submitted later than the first, from whose text it can be drafted.
    """

    groups: int
    samples: int
    prompt: int
    tokens: int
    streams: bool = False
    pairs: bool = False

    @property
    def num_samples(self) -> int:
        return self.groups * self.samples


def _host(rows: int, tokens: int) -> dict[str, Workload]:
    plain = partial(Workload, groups=rows, samples=1, prompt=32, tokens=tokens)
    return {f"host {rows}": plain(), f"host {rows} streamed": plain(streams=True)}


def _tail(rows: int, prompt: int, tokens: int) -> dict[str, Workload]:
    workload = partial(Workload, prompt=prompt, tokens=tokens)
    return {
        f"tail {rows}": workload(groups=rows, samples=1),
        f"pairs {rows}": workload(groups=rows, samples=2, pairs=True),
    }


ATTENTION: Final = ("256x1@128", "16x16@1024", "16x16@4096", "8x8@512")
HOST_ROWS: Final = (16, 64, 256)
TAIL_ROWS: Final = (1, 4, 16)
TAIL: Final = tuple(f"tail {rows}" for rows in TAIL_ROWS)
PAIRS: Final = tuple(f"pairs {rows}" for rows in TAIL_ROWS)
HOST: Final = tuple(name for rows in HOST_ROWS for name in _host(rows, 1))


BATCHES: Final[Mapping[str, tuple[str, ...]]] = {
    "off": (*ATTENTION, *TAIL, *PAIRS),
    "always": ATTENTION,
    "auto": ATTENTION,
    "siblings": PAIRS,
    "drafter": TAIL,
    "host": HOST,
}


def _all(*, attention: Mapping[str, Workload], host_tokens: int, tail: tuple[int, int]) -> Any:
    hosts = (_host(rows, host_tokens) for rows in HOST_ROWS)
    tails = (_tail(rows, *tail) for rows in TAIL_ROWS)
    return {**attention, **{k: v for named in (*hosts, *tails) for k, v in named.items()}}


ON_GPU: Final[Mapping[str, Workload]] = _all(
    attention={
        name: Workload(groups=groups, samples=samples, prompt=prompt, tokens=64)
        for name, (groups, samples, prompt) in zip(
            ATTENTION, ((256, 1, 128), (16, 16, 1024), (16, 16, 4096), (8, 8, 512)), strict=True
        )
    },
    host_tokens=64,
    tail=(1024, 128),
)
REHEARSAL: Final[Mapping[str, Workload]] = _all(
    attention={
        name: Workload(groups=groups, samples=samples, prompt=prompt, tokens=4)
        for name, (groups, samples, prompt) in zip(
            ATTENTION, ((8, 1, 32), (2, 4, 96), (2, 4, 128), (2, 2, 64)), strict=True
        )
    },
    host_tokens=4,
    tail=(48, 8),
)
