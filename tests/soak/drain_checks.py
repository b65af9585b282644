"""Checks that a soak of drains has handed over work, by its counts and the replicas' logs."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from service.drain import LOG_SECONDS

ANSWERED_PER_DRAIN = 1.0
MOVED_PER_DRAIN = 0.1
KINDS = ("rollouts", "sessions")
MOVED = re.compile(rf"({'|'.join(KINDS)}) \S+ moved to ")
"""Message of a sender about work that another replica has accepted."""
WAITING = "draining for "


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDrain:
    """Drain that took longer than the interval in which a replica logs what it waits for."""

    seconds: float
    reason: str


def messages(lines: Iterable[str]) -> list[str]:
    """Messages of a log in JSON, which may have other lines, and a part of one after a kill."""
    stripped = (line.strip() for line in lines)
    objects = (json.loads(line) for line in stripped if line[:1] == "{" and line[-1] == "}")
    return [str(each.get("message", "")) for each in objects]


def num_moved(log: Iterable[str]) -> Counter[str]:
    """Numbers of accepted offers in the messages of a log, by kind."""
    return Counter(found[1] for message in log if (found := MOVED.match(message)))


def slow_drain(seconds: float, log: Iterable[str]) -> SlowDrain | None:
    """The drain with its last logged reason, which is empty if there is none.

    A drain that waits although nothing is left has none.
    """
    if seconds < 1.5 * LOG_SECONDS:
        return None
    waiting = [message for message in log if message.startswith(WAITING)]
    reason = waiting[-1].partition("left: ")[2] if waiting else ""
    return SlowDrain(seconds=seconds, reason="" if reason == "nothing" else reason)


def not_exercised(
    counts: Mapping[str, int], kinds: Collection[str], moved: Mapping[str, int], num_drains: int
) -> list[str]:
    """Kinds of requests that were answered, or moved, less often than a soak demands."""
    answered = {kind: counts.get(f"answered ({kind})", 0) for kind in kinds}
    few = [
        f"{kind}: {number} answered"
        for kind, number in answered.items()
        if number < ANSWERED_PER_DRAIN * num_drains
    ]
    few_offers = [
        f"{kind}: {moved.get(kind, 0)} moved"
        for kind in KINDS
        if moved.get(kind, 0) < MOVED_PER_DRAIN * num_drains
    ]
    return few + few_offers
