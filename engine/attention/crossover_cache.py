"""File cache of the crossover, so that only a machine's first start measures it.

The file name is a digest of all inputs that the times depend on, and the content lists them. An
unreadable file is measured again; after a failed write, or a measurement on a busy machine, the
next start measures again.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from engine.attention.crossover import Crossover, CrossoverTrial

logger = logging.getLogger(__name__)

MIN_STEADY_SHARE = 0.75

CacheKey = dict[str, str | int]


def crossover(
    directory: Path, cache_key: CacheKey, measure: Callable[[], Sequence[CrossoverTrial]]
) -> Crossover:
    file = directory / f"{_digest_of(cache_key)}.json"
    kept = _read(file)
    if kept is not None:
        return kept
    trials = measure()
    measured = Crossover.fit(trials)
    if sum(trial.steady for trial in trials) < MIN_STEADY_SHARE * len(trials):
        logger.info("the machine was busy: the attention's crossover is used, and not kept")
        return measured
    try:
        _write(file, json.dumps({"of": cache_key, "costs": asdict(measured)}, indent=2))
    except OSError as error:
        logger.warning("the attention's crossover is not kept: %s", error)
    return measured


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _digest_of(cache_key: CacheKey) -> str:
    return hashlib.sha256(json.dumps(cache_key, sort_keys=True).encode()).hexdigest()[:16]


def _read(file: Path) -> Crossover | None:
    try:
        costs = json.loads(file.read_text())["costs"]
        return Crossover(stock=tuple(costs["stock"]), shared=tuple(costs["shared"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, text: str) -> None:
    """Write atomically: ranks and replicas that start concurrently write the same file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(file)
