"""Benchmark: time to update and draft from a draft store of up to ten million tokens.

Texts are drawn from a distribution in which phrases recur, over a vocabulary of 32,000; a group's
samples copy some of the same phrases. One call processes a whole step of 256 requests. The store
has one thread, and its processor time is measured: other work on the machine affects its caches but
not its time.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

from bench.harness.record import Record, Row, add_out
from kernels.draft_index.compiled_store import DraftStore
from kernels.draft_index.store_protocol import Int32Array

VOCABULARY, ROWS, GROUP, LIMIT, RESPONSE, PROMPT, PHRASE = 32_000, 256, 16, 8, 512, 64, 24
SIZES = (0, 10**6, 10**7)
STEPS = 200
GOAL_MICROSECONDS = 5.0
MAX_BYTES = 2**32


class Texts:
    """Random texts to draft. A prompt's responses consist of its own and of common phrases."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._common = self._drawn((4096, PHRASE))

    def _drawn(self, shape: tuple[int, ...]) -> Int32Array:
        ranks = self._random.zipf(1.2, size=shape)
        return (ranks % VOCABULARY).astype(np.int32)

    def prompt(self) -> Int32Array:
        return self._drawn((PROMPT,))

    def phrases(self) -> Int32Array:
        return self._drawn((32, PHRASE))

    def response(self, own: Int32Array, length: int = RESPONSE) -> Int32Array:
        number = length // PHRASE + 1
        pools = own[self._random.integers(len(own), size=number)]
        common = self._common[self._random.integers(len(self._common), size=number)]
        chosen = np.where(self._random.random((number, 1)) < 0.7, pools, common)
        slips = self._random.random(chosen.shape) < 0.05
        text: Int32Array = np.where(slips, self._drawn(chosen.shape), chosen).reshape(-1)[:length]
        return np.ascontiguousarray(text, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    tokens: int
    microseconds: list[float]
    """Time per request and token, one entry per step."""
    allocated: int


def filled(texts: Texts, tokens: int) -> DraftStore:
    store = DraftStore(max_bytes=MAX_BYTES)
    while store.num_tokens < tokens:
        prompt, own = texts.prompt(), texts.phrases()
        slots = [store.begin(b"old", prompt) for _ in range(GROUP)]
        responses = [texts.response(own) for _ in slots]
        step(store, slots, responses, 0)
        for slot in slots:
            store.end(slot, keep=True)
    store.age()
    return store


def step(store: DraftStore, slots: list[int], came: list[Int32Array], limit: int) -> None:
    store.step(
        np.array(slots, np.int32),
        np.array([len(tokens) for tokens in came], np.int32),
        np.concatenate(came),
        np.full(len(slots), limit, np.int32),
    )


def measured(size: int) -> Measured:
    """Measure the time per step and request to update the draft store and to draft from it.

    The requests differ in prompt and length, and each gets one token per step.
    """
    texts = Texts(seed=1)
    store = filled(texts, size)
    slots: list[int] = []
    responses: list[Int32Array] = []
    for group in range(ROWS // GROUP):
        prompt, own = texts.prompt(), texts.phrases()
        slots += [store.begin(b"%d" % group, prompt) for _ in range(GROUP)]
        responses += [texts.response(own, RESPONSE + STEPS) for _ in range(GROUP)]
    starts = [RESPONSE * (i % GROUP) // GROUP for i in range(ROWS)]
    step(store, slots, [one[:at] for one, at in zip(responses, starts, strict=True)], 0)
    rows = np.array(slots, np.int32)
    ones, limits = np.ones(ROWS, np.int32), np.full(ROWS, LIMIT, np.int32)
    columns = [
        np.array([one[at + i] for one, at in zip(responses, starts, strict=True)], np.int32)
        for i in range(STEPS)
    ]
    times = []
    for column in columns:
        began = time.thread_time()
        store.step(rows, ones, column, limits)
        times.append((time.thread_time() - began) / ROWS * 1e6)
    return Measured(tokens=store.num_tokens, microseconds=times, allocated=store.allocated_bytes)


def rows(found: list[Measured]) -> list[Row]:
    def verdict(value: float, goal: float) -> str:
        return "met" if value <= goal else "missed"

    return [
        Row(
            what=f"update and draft per request and token, {one.tokens:,} tokens stored",
            value=f"{(middle := statistics.median(one.microseconds)):.2f} microseconds, "
            f"99 of 100 steps below {np.quantile(one.microseconds, 0.99):.2f}; "
            f"{one.allocated / 2**20:,.0f} MiB allocated",
            goal=f"<= {GOAL_MICROSECONDS:g}",
            verdict=verdict(middle, GOAL_MICROSECONDS),
        )
        for one in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_out(parser)
    arguments = parser.parse_args()
    result = Record(
        name="draft_store",
        claim=f"Time of the draft store alone, without engine or model: {ROWS} requests in groups "
        f"of {GROUP}, one new token per request and step, drafts of up to {LIMIT} tokens. The "
        f"texts are random over a vocabulary of {VOCABULARY:,}; phrases of {PHRASE} tokens are "
        "repeated with one token in twenty changed. Processor time of one thread, on a machine "
        "with other work.",
        rows=rows([measured(size) for size in SIZES]),
    )
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
