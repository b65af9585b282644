"""Benchmark: accepted length of replicas that share their draft history, by replays of rollouts.

The epochs of recorded rollouts are distributed over replicas at random, as a load balancer would.
The replicas step together. Each has a draft store of its own, and what they exchange is encoded,
decoded and added as the service does. The same distribution is replayed with one store for all
replicas, and with stores that learn only from their own replica. Nothing but the time to add a
token is timed; that is processor time of one thread.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.harness.record import Record, Row, add_out
from bench.replay.drafters import StoreDrafter
from bench.replay.replay import Fixed, Replay, ReplayResult
from bench.replay.traces import TRACES, Group, Trace
from engine.speculation.drafting import OTHER_ENGINES
from kernels.draft_index.store import DraftStore
from kernels.draft_index.store_protocol import DraftBatch, Int32Array
from service.draft_history.entries import FinishedText, decode, encode

NUM_REPLICAS = (2, 4)
INTERVALS = (16, 64)
"""Steps between two exchanges. A second has 20 to 100 steps."""
LONGEST, RUNNING, SEEDS = 8, 64, 10
VOCABULARY = 2**31 - 1
MIN_RATIO = 0.98
TIMED_TOKENS, TIMED_LENGTH = 2**20, 512


@dataclass(slots=True)
class Link:
    """Entries that replicas write. Each share of `loss` is lost on its way to each replica."""

    loss: float = 0.0
    num_bytes: int = 0
    num_tokens: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def exchange(self, drafters: Sequence["SharingDrafter"], epoch: int) -> None:
        written = [(drafter, self._written(drafter)) for drafter in drafters]
        for writer, entries in written:
            for data in entries:
                for reader in drafters:
                    if reader is not writer and self.chance.random() >= self.loss:
                        reader.receive(data, epoch)

    def _written(self, drafter: "SharingDrafter") -> list[bytes]:
        texts, drafter.finished = drafter.finished, []
        entries = [entry.data for entry in encode(texts)]
        self.num_bytes += sum(map(len, entries))
        self.num_tokens += sum(len(text.response) for text in texts)
        return entries


class SharingDrafter(StoreDrafter):
    """Draft store of a replica that shares its finished samples."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: list[FinishedText] = []
        self._epoch = 0
        self._texts: dict[int, tuple[Sequence[int], list[int]]] = {}

    def begin(self, group: bytes, prompt: Sequence[int]) -> int:
        slot = super().begin(group, prompt)
        self._texts[slot] = prompt, []
        return slot

    def step(
        self, rows: Sequence[int], came: Sequence[Sequence[int]], max_draft_tokens: int
    ) -> DraftBatch:
        for slot, tokens in zip(rows, came, strict=True):
            self._texts[slot][1].extend(tokens)
        return super().step(rows, came, max_draft_tokens)

    def end(self, slot: int, came: Sequence[int]) -> None:
        super().end(slot, came)
        prompt, response = self._texts.pop(slot)
        self.finished.append(FinishedText(sequence=self._epoch, prompt=prompt, response=response))

    def age(self) -> None:
        super().age()
        self._epoch += 1

    def receive(self, data: bytes, epoch: int) -> None:
        entry = decode(data, VOCABULARY)
        for prompt, responses in entry.texts:
            self.store.add(OTHER_ENGINES, prompt, responses, age=epoch - entry.sequence)


def replay(
    trace: Trace, drafters: Sequence[StoreDrafter], seed: int, on_steps: Callable[[int, int], None]
) -> ReplayResult:
    """Replay a trace on one replica per drafter; `on_steps` gets the epoch and number of steps."""
    result = ReplayResult()
    replicas = [
        Replay(
            drafter=drafter,
            controller=Fixed(LONGEST),
            max_running=RUNNING // len(drafters),
            max_draft_tokens=LONGEST,
            result=result,
        )
        for drafter in drafters
    ]
    chance = random.Random(seed)
    for epoch, groups in enumerate(trace.epochs):
        parts = distributed(groups, len(replicas), chance)
        running = [one.steps(epoch, part) for one, part in zip(replicas, parts, strict=True)]
        num_steps = 0
        while running := [one for one in running if next(one, StopIteration) is None]:
            num_steps += 1
            on_steps(epoch, num_steps)
        on_steps(epoch, 0)
        for drafter in {id(each): each for each in drafters}.values():
            drafter.age()
    return result


def distributed(
    groups: Sequence[Group], num_replicas: int, chance: random.Random
) -> list[list[tuple[int, Group]]]:
    """Groups with their index, in equal numbers per replica."""
    order = list(range(len(groups)))
    chance.shuffle(order)
    return [
        [(index, groups[index]) for index in sorted(order[first::num_replicas])]
        for first in range(num_replicas)
    ]


def one_store(trace: Trace, num_replicas: int, seed: int) -> ReplayResult:
    return replay(trace, [StoreDrafter()] * num_replicas, seed, lambda epoch, step: None)


def own_stores(trace: Trace, num_replicas: int, seed: int) -> ReplayResult:
    drafters = [StoreDrafter() for _ in range(num_replicas)]
    return replay(trace, drafters, seed, lambda epoch, step: None)


def sharing(
    trace: Trace, num_replicas: int, seed: int, *, interval: int, link: Link
) -> ReplayResult:
    """Replay with stores that exchange every `interval` steps, and between two epochs."""
    drafters = [SharingDrafter() for _ in range(num_replicas)]

    def on_steps(epoch: int, num_steps: int) -> None:
        if num_steps % interval == 0:
            link.exchange(drafters, epoch)

    return replay(trace, drafters, seed, on_steps)


def ratio(results: Sequence[ReplayResult], others: Sequence[ReplayResult]) -> tuple[str, float]:
    """Median ratio of accepted lengths as text, with the range over seeds; and the smallest one."""
    ratios = [
        one.accepted_length / other.accepted_length
        for one, other in zip(results, others, strict=True)
    ]
    text = f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
    return text, min(ratios)


def rows_of(trace: Trace, num_replicas: int) -> Iterator[Row]:
    what = f"T {trace.temperature}, {num_replicas} replicas"
    shared, own = (
        [arm(trace, num_replicas, seed) for seed in range(SEEDS)] for arm in (one_store, own_stores)
    )
    lengths = (statistics.median(one.accepted_length for one in each) for each in (shared, own))
    yield Row(
        what=f"{what}: accepted length",
        value="one store for all {:.2f}, own stores {:.2f}".format(*lengths),
    )
    yield Row(what=f"{what}, own stores / one store", value=ratio(own, shared)[0])
    for interval in INTERVALS:
        for loss in (0.0, 0.5) if interval == INTERVALS[-1] else (0.0,):
            links = [Link(loss=loss) for _ in range(SEEDS)]
            found = [
                sharing(trace, num_replicas, seed, interval=interval, link=link)
                for seed, link in enumerate(links)
            ]
            text, smallest = ratio(found, shared)
            lossless = loss == 0
            num_bytes = sum(link.num_bytes for link in links)
            per_token = num_bytes / sum(link.num_tokens for link in links)
            lost = "" if lossless else f", {loss:.0%} of the entries lost"
            yield Row(
                what=f"{what}, exchange every {interval} steps{lost} / one store",
                value=f"{text}; {per_token:.1f} bytes written per sampled token",
                goal=f">= {MIN_RATIO}" if lossless else "",
                verdict=("met" if smallest >= MIN_RATIO else "missed") if lossless else "",
            )


def added_row() -> Row:
    """Processor time to add a token, over random texts of 512 tokens, 16 per prompt."""
    chance = np.random.default_rng(0)
    store = DraftStore(max_bytes=2**30)
    prompts: list[Int32Array] = [
        chance.integers(0, 32_000, 64).astype(np.int32)
        for _ in range(TIMED_TOKENS // TIMED_LENGTH // 16)
    ]
    responses = (chance.zipf(1.2, (len(prompts), 16, TIMED_LENGTH)) % 32_000).astype(np.int32)
    began = time.process_time()
    for prompt, texts in zip(prompts, responses, strict=True):
        store.add(OTHER_ENGINES, prompt, list(texts), age=0)
    seconds = time.process_time() - began
    return Row(
        what="time to add a token of another replica",
        value=f"{seconds / responses.size * 1e6:.2f} microseconds",
    )


def claim(traces: Sequence[Trace]) -> str:
    one = traces[0]
    return (
        "Mean accepted length (tokens per forward pass) on recorded rollouts of the bundled model: "
        f"{len(one.epochs)} epochs of {len(one.epochs[0])} prompts, "
        f"{len(one.epochs[0][0].responses)} samples each, distributed over replicas at random in "
        f"each epoch, {RUNNING} running samples in total, drafts of at most {LONGEST} tokens. "
        f"Ratios are the median and the range over {SEEDS} distributions, each compared with one "
        "store for all replicas under the same distribution."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES)
    add_out(parser)
    arguments = parser.parse_args()
    traces = [Trace.load(path) for path in sorted(arguments.traces.glob("*.npz"), reverse=True)]
    rows = [row for trace in traces for number in NUM_REPLICAS for row in rows_of(trace, number)]
    result = Record(name="draft_history", claim=claim(traces), rows=[*rows, added_row()])
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
