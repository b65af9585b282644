"""Which drafter serves, which waits for its trial, and which is on trial.

One waits at most: a newer one of our own takes its place, but not that of one that was brought from
elsewhere. All of it happens on the event loop, a turn a second; only what may copy files between
disks is left to a thread.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.drafter.counters import Counted
from engine.drafter.service.ab_test import Trial
from engine.drafter.service.checkpoint_dir import CHECKPOINT, FIRST, Folder
from engine.errors import DrafterRefused
from engine.protocol import DrafterOutcome

log = logging.getLogger(__name__)

TRAINED: Final = "trained-"
OWN: Final = (TRAINED, "published-")
"""How versions and files of our own begin."""

Load = Callable[[str, str, bool], Awaitable[bool]]
"""A version, the one whose file is put back if that fails, and whether it is on trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """`offered`: it was trained elsewhere."""

    version: str
    offered: bool


class Contest:
    """Owns the files in the folder. `adopted` is told of those from elsewhere that stay. The file
    of whatever is loaded is there until something else is.
    """

    def __init__(self, folder: Folder, load: Load, adopted: Callable[[Path], None]) -> None:
        self._folder = folder
        self._load = load
        self._adopted = adopted
        self._next: Candidate | None = None
        self._candidate: Candidate | None = None
        self._is_one_coming = False
        self._trial: Trial | None = None
        self._counted: Counted | None = None
        self._seen: dict[str, tuple[int, int]] = {}
        self.serving = folder.serving or ""
        self.outcomes: dict[DrafterOutcome, int] = {}

    @property
    def challenger(self) -> str | None:
        """Who is on trial, or else waits for it."""
        known = self._candidate or self._next
        return None if known is None else known.version

    async def offer(self, path: Path, version: str) -> None:
        """Takes the file, which was checked, for the next trial. What is cancelled leaves at most a
        file that the next start sweeps."""
        if version in (self.serving, FIRST, CHECKPOINT) or version.startswith(OWN):
            raise DrafterRefused("the version exists, or has a name that is the server's own")
        known = (self._next, self._candidate)
        if self._is_one_coming or any(one is not None and one.offered for one in known):
            raise DrafterRefused("another drafter waits for its trial, or is on trial")
        self._is_one_coming = True
        try:
            brought = await asyncio.to_thread(self._folder.bring, path)
        finally:
            self._is_one_coming = False
        self._folder.take(brought, version)
        self._put_next(Candidate(version=version, offered=True))

    def published(self, path: Path, num_steps: int) -> None:
        """One that was trained here."""
        version = f"{TRAINED}{num_steps}"
        candidate = self._candidate.version if self._candidate else None
        if version in (self.serving, candidate):  # of a run that began again from the first step
            path.unlink(missing_ok=True)
            return
        self._folder.take(path, version)
        if self._next is not None and self._next.offered:
            self._folder.drop(version)
        else:
            self._put_next(Candidate(version=version, offered=False))

    async def turn(self, counted: Counted | None) -> None:
        self._counted = counted
        if self._trial is not None:
            await self._move_on(self._trial)
        elif self._next is not None:
            await self._begin_trial(self._next)

    def _put_next(self, candidate: Candidate) -> None:
        if self._next is not None and self._next.version != candidate.version:
            self._folder.drop(self._next.version)
        self._next = candidate

    async def _begin_trial(self, candidate: Candidate) -> None:
        # While it is loaded nothing else may be offered.
        self._candidate, self._next = candidate, None
        self._seen = {} if self._counted is None else _first_tokens(self._counted)
        if await self._serve(candidate.version, on_trial=True):
            self._trial = Trial()
        else:
            self._ended(candidate, "failed")

    async def _move_on(self, trial: Trial) -> None:
        candidate = self._candidate
        assert candidate is not None, "on trial"
        side = trial.side
        versions = {"new": candidate.version, "old": self.serving}
        outcome = trial.observed(*self._since_last(versions[side]))
        if outcome == side:
            return
        if outcome == "promoted":
            await self._promote(candidate)
        elif outcome == "rolled_back":
            await self._serve(self.serving, on_trial=False)
            self._ended(candidate, "rolled_back")
        elif not await self._serve(versions[outcome], on_trial=True):
            await self._serve(self.serving, on_trial=False)
            self._ended(candidate, "failed")

    async def _promote(self, candidate: Candidate) -> None:
        if not await self._serve(candidate.version, on_trial=False):
            await self._serve(self.serving, on_trial=False)
            self._ended(candidate, "failed")
            return
        before, self.serving = self.serving, candidate.version
        self._folder.settle(candidate.version)
        self._folder.drop(before)
        self._folder.refresh_start()
        if candidate.offered:
            self._adopted(self._folder.file(candidate.version))
        self._ended(candidate, "promoted")

    def _ended(self, candidate: Candidate, outcome: DrafterOutcome) -> None:
        log.info("drafter %s: %s", candidate.version, outcome)
        if candidate.version != self.serving:
            self._folder.drop(candidate.version)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self._candidate = self._trial = None

    async def _serve(self, version: str, *, on_trial: bool) -> bool:
        return await self._load(version, self.serving, on_trial)

    def _since_last(self, version: str) -> tuple[int, int]:
        """First tokens drafted and accepted of a version since it was asked last."""
        now = _first_tokens(self._counted) if self._counted is not None else {}
        drafted, accepted = now.get(version, (0, 0))
        before = self._seen.get(version, (0, 0))
        self._seen[version] = (drafted, accepted)
        return max(0, drafted - before[0]), max(0, accepted - before[1])


def _first_tokens(counted: Counted) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for pair in counted["pairs"]:
        drafted, accepted = found.get(pair["drafter"], (0, 0))
        found[pair["drafter"]] = (
            drafted + pair["first_drafted"],
            accepted + pair["first_accepted"],
        )
    return found
