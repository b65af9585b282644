"""Replicas that drain at random under load, some with a fault while work is handed over.

    python -m tests.soak.drains [--drains 200] [--engine fake|real] [--seed 1] [--report PAGE]

Three replicas and a real Redis, each a process. Every caller must receive all tokens of its
samples, each once, and the same bytes of prompt KV as long as it holds the handle. Without a fault
no caller may notice the drain, except that it follows a redirect or continues to read a stream at
another replica. The run fails if too few requests of a kind were answered, or moved, or if the log
of a replica has no reason for a long drain.
"""

import argparse
import asyncio
import datetime
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.redis_server import RedisServer
from tests.soak.cluster_model import CountingModel, FleetModel, SeedlingModel
from tests.soak.drain_callers import MAX_TOKENS, NUM_SAMPLES, Callers
from tests.soak.drain_checks import SlowDrain, messages, not_exercised, num_moved, slow_drain
from tests.soak.fault_injection import SHARED
from tests.soak.replicas import NUM_REPLICAS, Replica, replicas
from tests.soak.report import machine, write

FAULT_SHARE = 0.25
ROLLED_SHARE = 0.4
REDIS_SECONDS = 1.0
SETTINGS = {
    "CLUSTER__HEARTBEAT_SECONDS": "0.3",
    "CLUSTER__EXPIRE_SECONDS": "2",
    "SERVER__DRAIN_SECONDS": "60",
}
"""A started replica waits for `expire_seconds` before it serves."""


class Drains:
    """Drains replicas one after the other.

    `seconds` are those of the drains without a fault, and `slow` those that took long.
    """

    def __init__(
        self, redis: RedisServer, fleet: Sequence[Replica], callers: Callers, seed: int
    ) -> None:
        self.seconds: list[float] = []
        self.slow: list[SlowDrain] = []
        self.counts: Counter[str] = Counter()
        self._redis = redis
        self._fleet = list(fleet[:NUM_REPLICAS])
        self._spare = fleet[NUM_REPLICAS]
        self._callers = callers
        self._random = random.Random(seed)

    def run(self, number: int) -> None:
        for index in range(number):
            time.sleep(self._random.uniform(0.0, 1.0))
            replica = self._random.choice(self._fleet)
            kind = self._random.random()
            if kind < FAULT_SHARE:
                self._drain_with_fault(replica)
                replica.start()
            elif kind < FAULT_SHARE + ROLLED_SHARE:
                self._roll(replica)
            else:
                self._drain(replica, "none")
                replica.start()
            print(f"{index + 1} of {number} drains", flush=True)

    def _drain(self, replica: Replica, name: str) -> None:
        before = replica.place.log.stat().st_size
        self.seconds.append(replica.stop())
        self.counts[name] += 1
        with replica.place.log.open() as file:
            file.seek(before)
            slow = slow_drain(self.seconds[-1], messages(file))
        self.slow += [] if slow is None else [slow]

    def _roll(self, replica: Replica) -> None:
        """Starts another replica, then drains this one, as a rolling update of the chart does."""
        self._spare.start()
        self._fleet[self._fleet.index(replica)] = self._spare
        self._drain(replica, "none; a new replica was started before (rolling update)")
        self._spare = replica

    def _drain_with_fault(self, replica: Replica) -> None:
        faults = (self._kill_drained, self._kill_receiver, self._pause_redis, self._restart_redis)
        fault: Callable[[Replica], str] = self._random.choice(faults)
        self._callers.last_fault_at = time.monotonic()
        stopping = threading.Thread(target=_stop, args=(replica,))
        stopping.start()
        time.sleep(self._random.uniform(0.0, 0.3))
        self.counts[fault(replica)] += 1
        stopping.join()
        self._callers.last_fault_at = time.monotonic()

    def _kill_drained(self, replica: Replica) -> str:
        with suppress(psutil.NoSuchProcess):  # it has just exited
            replica.end()
        return "the draining replica killed (SIGKILL)"

    def _kill_receiver(self, replica: Replica) -> str:
        receiver = self._random.choice([other for other in self._fleet if other is not replica])
        receiver.kill()
        receiver.start()
        return "another replica killed and restarted (SIGKILL)"

    def _pause_redis(self, replica: Replica) -> str:
        self._redis.pause()
        time.sleep(REDIS_SECONDS)
        self._redis.resume()
        return "Redis suspended (SIGSTOP)"

    def _restart_redis(self, replica: Replica) -> str:
        self._redis.restart()
        return "Redis killed and restarted, empty (SIGKILL)"


def _stop(replica: Replica) -> None:
    with suppress(AssertionError):  # it may have been killed
        replica.stop()


def main() -> None:
    options = _options()
    model: FleetModel = SeedlingModel() if options.engine == "real" else CountingModel()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=SHARED) as arenas,
        replicas(model, Path(folder), Path(arenas), num_spare=1, **SETTINGS) as (redis, fleet),
    ):
        callers = Callers([replica.url for replica in fleet], model, options.seed)
        drains = Drains(redis, fleet, callers, options.seed)
        _under_load(drains, callers, options.drains)
        moved = Counter[str]()
        for replica in fleet:
            moved += num_moved(messages(replica.place.log.read_text().splitlines()))
    table = _table(model, drains, callers, moved)
    print(table)
    wrong = model.find_wrong(callers.reports)
    assert not callers.violations, callers.violations
    missing = not_exercised(callers.counts, callers.kinds, moved, options.drains)
    assert not missing, missing
    assert all(slow.reason for slow in drains.slow), drains.slow
    assert not wrong, f"{len(wrong)} of {len(callers.reports)}, such as {wrong[:3]}"
    if options.report:
        write(options.report, f"drains, {model.name} engine", table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drains", type=int, default=200)
    parser.add_argument("--engine", choices=("fake", "real"), default="fake")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    return parser.parse_args()


def _under_load(drains: Drains, callers: Callers, number: int) -> None:
    failures: list[BaseException] = []

    def call() -> None:
        try:
            asyncio.run(callers.run())
        except BaseException as error:
            failures.append(error)

    calling = threading.Thread(target=call)
    calling.start()
    try:
        drains.run(number)
    finally:
        callers.over = True
        calling.join()
    if failures:
        raise failures[0]


def _table(model: FleetModel, drains: Drains, callers: Callers, moved: Mapping[str, int]) -> str:
    faults = "\n".join(f"| {name} | {count} |" for name, count in sorted(drains.counts.items()))
    outcomes = "\n".join(
        f"| {name} | {count:,} |" for name, count in sorted(callers.counts.items())
    )
    moves = "\n".join(f"| {kind} | {count:,} |" for kind, count in sorted(moved.items()))
    slow = "".join(
        f"A drain of {each.seconds:.1f} s waited for: {each.reason}.\n" for each in drains.slow
    )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    seconds = drains.seconds or [float("nan")]
    return f"""
`python -m tests.soak.drains {" ".join(sys.argv[1:])}` on {today}, {machine()}: {NUM_REPLICAS} \
replicas ({model.name} engine) and a real Redis, {model.num_callers} callers of rollouts with \
{NUM_SAMPLES} samples of {MAX_TOKENS} tokens, some of them trees, {drains.counts.total()} drains.

No token was lost, wrong or received twice: {len(callers.reports):,} different samples had the \
tokens of an undisturbed run.
From SIGTERM to the exit of a process without a fault: median {statistics.median(seconds):.2f} s, \
longest {max(seconds):.2f} s.
{slow}
| fault during the drain | times |
|---|---|
{faults}

| outcome of a request | times |
|---|---|
{outcomes}

| moved to another replica | times |
|---|---|
{moves}

"""


if __name__ == "__main__":
    main()
