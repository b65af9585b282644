"""`make soak`: many groups and malformed requests through one real server, and their table.

    python -m tests.soak [--groups N] [--malformed N] [--report docs/operate/reliability.md]

Load goes to 127.0.0.1 only, from a few threads, and ends.
"""

import argparse
import datetime
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

from tests.invariants.service_process import ServiceProcess, home, service, until
from tests.soak.group_load import GROUPS_A_REQUEST, SAMPLES, TOKENS, Groups
from tests.soak.malformed import Malformed
from tests.soak.report import machine, write
from tests.soak.resource_usage import ResourceUsage, sample_periodically

CALLERS = 4
# The KV cache is so small that all of it has been touched, and is resident, after the warm-up.
FLAGS = (
    "--engine.cpu-threads", str(len(os.sched_getaffinity(0))),
    "--engine.cache-bytes", str(64 * 2**20),
    "--engine.max-context-tokens", "256",
    "--engine.max-sequences", "128",
    "--limits.max-samples-per-key", "256",
    "--limits.keep-answers-bytes", "4000000",
    "--server.drain-seconds", "60",
)  # fmt: skip
# oneDNN caches up to 1,024 compiled kernels, one per number of tokens in a step. Filling this cache
# takes longer than the soak and would hide a leak of the same size.
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}


def main() -> None:
    options = _options()
    os.environ.update(KERNELS)
    with home() as place, service(place, *FLAGS) as server:
        core = server.core.pid
        groups, group_seconds, usage = _groups(server, options.groups)
        print(*(level.row() for level in usage), sep="\n", flush=True)
        malformed, malformed_seconds = _malformed(server, options.malformed, options.seed)
        print(dict(sorted(malformed.statuses.items())), *malformed.violations[:5], sep="\n")
        assert not malformed.violations, f"{len(malformed.violations)} answers of 5xx but 503"
        _serves(server, core)
        server.signal(signal.SIGTERM)
        assert server.wait(120) == 0
        until(
            lambda: not server.surviving_processes(), seconds=5, what="the engine's processes end"
        )
        assert place.leftover_files() == []
        for level in usage:
            level.check()
    table = _table(groups, group_seconds, usage, malformed, malformed_seconds)
    print(table)
    if options.report:
        write(options.report, "soak", table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--malformed", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    return parser.parse_args()


def _groups(server: ServiceProcess, total: int) -> tuple[Groups, float, list[ResourceUsage]]:
    groups = Groups(server.url, total)
    usage = [
        ResourceUsage(name="service", process=psutil.Process(server.process.pid)),
        ResourceUsage(name="EngineCore", process=server.core),
    ]
    began = time.monotonic()
    with sample_periodically(usage, lambda: groups.num_ended):
        groups.run(CALLERS)
    assert not groups.failures, groups.failures[:3]
    assert groups.num_ended >= total
    return groups, time.monotonic() - began, usage


def _malformed(server: ServiceProcess, total: int, seed: int) -> tuple[Malformed, float]:
    malformed = Malformed(server.url, total, seed)
    began = time.monotonic()
    malformed.run(CALLERS)
    return malformed, time.monotonic() - began


def _serves(server: ServiceProcess, core: int) -> None:
    """Asserts that afterwards the same engine is alive, idle, and samples as before."""
    assert psutil.Process(core).is_running()
    for probe in ("/livez", "/readyz"):
        assert httpx.get(server.url + probe, timeout=60).status_code == 200
    status = httpx.get(f"{server.url}/v1/status", timeout=60).json()
    assert (status["num_samples_running"], status["paused"]) == (0, False), status
    body = {"groups": [{"prompt": {"text": "1+1="}}], "sampling": {"max_tokens": 4}}
    answer = httpx.post(f"{server.url}/v1/rollouts", json=body, timeout=60).json()
    assert answer["outcome"] == "done", answer


def _table(
    groups: Groups,
    group_seconds: float,
    usage: list[ResourceUsage],
    malformed: Malformed,
    malformed_seconds: float,
) -> str:
    families = Counter(
        "503" if status == 503 else f"{status // 100}xx" if status else "none"
        for status in malformed.statuses.elements()
    )
    answers = ", ".join(f"{name}: {count:,}" for name, count in sorted(families.items()))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"""
`python -m tests.soak {" ".join(sys.argv[1:])}` on {today}, {machine()}.

{CALLERS} callers sent {groups.num_ended:,} groups of {SAMPLES} samples and {TOKENS} tokens \
in {group_seconds:.0f} s, {GROUPS_A_REQUEST} groups
per request. {groups.num_done:,} groups were done, and {groups.num_disconnected:,} were cancelled \
because their caller disconnected.
Meanwhile {groups.num_activations} weights versions were uploaded and activated.

| process | memory after one fifth of the groups, and at the end | growth of a fitted line \
| threads | open files |
|---|---|---|---|---|
{usage[0].row()}
{usage[1].row()}

Then {malformed.num_sent:,} malformed requests were sent in {malformed_seconds:.0f} s, \
and a rollout succeeded as before. Responses by status
(none: the connection was closed): {answers}.

"""


if __name__ == "__main__":
    main()
