"""A cluster under load while each of its parts fails in turn, and the table of outcomes.

    python -m tests.soak.faults [--rounds 2] [--engine fake|real] [--report PAGE]

Three replicas and a real Redis, each a process. Callers use any replica, return through another and
disconnect midway. Every accepted group must end in an answer or in a retryable error; no token may
belong to another version than its label; no resource may leak.

The shared memory is a private mount, where namespaces are allowed, so that it can be filled and
inspected.
"""

import argparse
import asyncio
import datetime
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from tests.invariants.service_process import until
from tests.soak.cluster_load import FleetLoad
from tests.soak.cluster_model import CountingModel, FleetModel, SeedlingModel
from tests.soak.fault_injection import SHARED, FaultInjector
from tests.soak.replicas import ARENA_BYTES, NUM_REPLICAS, Replica, replicas
from tests.soak.report import machine, write

INSIDE = "--inside"
UNSHARE = ("unshare", "--map-root-user", "--mount")
MOUNTED = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$0" "$@"'


def main() -> None:
    options = _options()
    if not options.inside and subprocess.run([*UNSHARE, "true"]).returncode == 0:
        again = [sys.executable, "-m", "tests.soak.faults", *sys.argv[1:], INSIDE]
        os.execvp(UNSHARE[0], [*UNSHARE, "sh", "-c", MOUNTED, *again])
    model: FleetModel = SeedlingModel() if options.engine == "real" else CountingModel()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=SHARED) as arenas,
        replicas(model, Path(folder), Path(arenas)) as (redis, fleet),
    ):
        load = FleetLoad([replica.url for replica in fleet], model, seed=1)
        injector = FaultInjector(model, redis, fleet, load, own_memory=options.inside)
        seconds = _under_load(injector, load, model.num_callers, options.rounds)
        _end(fleet, injector)
        places = [Path(arenas), *(p for r in fleet for p in (r.place.temporary, r.place.weights))]
        left = [file for place in places for file in place.rglob("*")]
        left += [file for file in SHARED.iterdir() if options.inside and file != Path(arenas)]
        assert not left, left
    print(load.counts, load.violations[:5])
    assert not load.violations, f"{len(load.violations)} wrong answers"
    wrong = model.find_wrong(load.reports)
    assert not wrong, f"{len(wrong)} of {len(load.reports)}, such as {wrong[:3]}"
    table = _table(model, load, injector, seconds)
    print(table)
    if options.report:
        write(options.report, f"faults, {model.name} engine", table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("fake", "real"), default="fake")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--report", type=Path)
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _under_load(injector: FaultInjector, load: FleetLoad, num_callers: int, rounds: int) -> float:
    failures: list[BaseException] = []

    def call() -> None:
        try:
            asyncio.run(load.run(num_callers))
        except BaseException as error:
            failures.append(error)

    calling = threading.Thread(target=call)
    began = time.monotonic()
    calling.start()
    try:
        time.sleep(2)
        injector.run(rounds)
    finally:
        load.over = True
        calling.join()
    if failures:
        raise failures[0]
    return time.monotonic() - began


def _end(fleet: Sequence[Replica], injector: FaultInjector) -> None:
    for replica in fleet:
        until(lambda at=replica: _nothing_held(at), seconds=30, what="nothing is held")  # type: ignore[misc]
        injector.drain_seconds.append(replica.stop())


def _nothing_held(replica: Replica) -> bool:
    """True if no sample runs, no lease is left, and every byte of the arena is free."""
    with suppress(httpx.TransportError):
        status = httpx.get(f"{replica.url}/v1/status", timeout=10).json()
        free: bool = status["kv"]["free_bytes"] == status["kv"]["capacity_bytes"] <= ARENA_BYTES
        idle: bool = status["num_samples_running"] == status["kv"]["num_handles"] == 0
        return free and idle
    return False


def _table(model: FleetModel, load: FleetLoad, injector: FaultInjector, seconds: float) -> str:
    injected = "\n".join(f"| {name} | {count} |" for name, count in injector.done.items())
    became = "\n".join(f"| {name} | {count:,} |" for name, count in sorted(load.counts.items()))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    asked = " ".join(word for word in sys.argv[1:] if word != INSIDE)
    noticed = max(injector.noticed_seconds, default=None)
    return f"""
`python -m tests.soak.faults {asked}` on {today}, {machine()}: {NUM_REPLICAS} replicas
({model.name} engine) and a real Redis, {model.num_callers} callers, {seconds:.0f} s, \
{injector.num_versions} weights versions, each uploaded to one replica.

No token was wrong or labelled with another version. After the load no sample ran, \
and no lease was left.
After the stop no process, no file and no shared memory was left.
{model.summary(load.reports)}
The longest drain took {max(injector.drain_seconds):.1f} s.\
{"" if noticed is None else f" `/livez` reported a dead engine within {noticed:.1f} s."}

| fault | times |
|---|---|
{injected}

| outcome of a group | times |
|---|---|
{became}

"""


if __name__ == "__main__":
    main()
