"""Queue, A/B test and promotion of drafter versions.

At most one version is queued. A newer one from the local trainer replaces it, unless the queued one
was trained elsewhere. Everything runs on the event loop, once a second; only the import of files,
which may copy between disks, runs in a thread.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from engine.drafter.acceptance_by_version import Snapshot
from engine.drafter.service.checkpoint_dir import INITIAL_VERSION, TRAINER_CHECKPOINT, DrafterDir
from engine.errors import DrafterRefused
from engine.types.feature_stats import DrafterOutcome

WINDOWS_PER_SIDE: Final = 3
"""Number of windows in which each of the two drafters serves."""
WINDOW_DRAFTS: Final = 200
Side = Literal["old", "new"]
Verdict = Literal["promoted", "rolled_back"]


class AbTest:
    """A/B test of a new drafter against the one in use, over alternating windows of traffic.

    The two serve alternate windows, so both see the same traffic; the new one is first. A window
    ends when WINDOW_DRAFTS drafts made in it were verified. The test compares the acceptance rate
    of first tokens, which does not depend on draft length. After WINDOWS_PER_SIDE windows of each,
    the new drafter is promoted if it did no worse.
    """

    def __init__(self) -> None:
        self.side: Side = "new"
        self._windows_left = 2 * WINDOWS_PER_SIDE
        self._drafted = {"old": 0, "new": 0}
        self._accepted = {"old": 0, "new": 0}
        self._window_drafts = 0

    def update(self, num_drafted: int, num_accepted: int) -> Side | Verdict:
        """Add first-token counts since the last call; returns who serves next, or the verdict."""
        self._drafted[self.side] += num_drafted
        self._accepted[self.side] += num_accepted
        self._window_drafts += num_drafted
        if self._window_drafts < WINDOW_DRAFTS:
            return self.side
        self._window_drafts = 0
        self._windows_left -= 1
        if self._windows_left == 0:
            return (
                "promoted"
                if self.acceptance_rate("new") >= self.acceptance_rate("old")
                else "rolled_back"
            )
        self.side = "old" if self.side == "new" else "new"
        return self.side

    def acceptance_rate(self, side: Side) -> float:
        return self._accepted[side] / max(self._drafted[side], 1)


log = logging.getLogger(__name__)
TRAINED_PREFIX: Final = "trained-"
RESERVED_PREFIXES: Final = (TRAINED_PREFIX, "published-")
"""Prefixes reserved for version and file names that the server makes."""
LoadDrafter = Callable[[str, str, bool], Awaitable[bool]]
"""(version, version whose file is reloaded on failure, whether it is in an A/B test) -> success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Drafter version that is queued for an A/B test or in one.

    `is_external` is True if it was trained elsewhere.
    """

    version: str
    is_external: bool


class DrafterPromotion:
    """Queues new drafter versions, runs their A/B tests, and promotes or deletes them.

    It owns the drafter files. `on_adopted` is called with the file of each external version that is
    promoted. The file of the loaded version exists until another is loaded. While `is_asleep`,
    workers load no drafter, so tests neither start nor continue.
    """

    def __init__(
        self,
        drafter_dir: DrafterDir,
        load: LoadDrafter,
        on_adopted: Callable[[Path], None],
        is_asleep: Callable[[], bool],
    ) -> None:
        self._drafter_dir = drafter_dir
        self._load = load
        self._on_adopted = on_adopted
        self._is_asleep = is_asleep
        self._queued: Candidate | None = None
        self._candidate: Candidate | None = None
        self._is_importing = False
        self._test: AbTest | None = None
        self._snapshot: Snapshot | None = None
        self._last_counts: dict[str, tuple[int, int]] = {}
        self.serving = drafter_dir.serving or ""
        self.outcomes: dict[DrafterOutcome, int] = {}

    @property
    def candidate_version(self) -> str | None:
        """Drafter version in an A/B test, or else the queued one; None if there is neither."""
        known = self._candidate or self._queued
        return None if known is None else known.version

    async def submit(self, path: Path, version: str) -> None:
        """Queue a validated drafter file for the next A/B test.

        If cancelled, at most a file remains, which the next start deletes.
        """
        if version in (self.serving, INITIAL_VERSION, TRAINER_CHECKPOINT) or version.startswith(
            RESERVED_PREFIXES
        ):
            raise DrafterRefused("the version already exists or its name is reserved")
        known = (self._queued, self._candidate)
        if self._is_importing or any(one is not None and one.is_external for one in known):
            raise DrafterRefused("another drafter is queued or on trial")
        self._is_importing = True
        try:
            imported = await asyncio.to_thread(self._drafter_dir.import_file, path)
        finally:
            self._is_importing = False
        self._drafter_dir.assign_version(imported, version)
        self._queue_candidate(Candidate(version=version, is_external=True))

    def published(self, path: Path, num_steps: int) -> None:
        """Queue a drafter version that the local trainer has published."""
        version = f"{TRAINED_PREFIX}{num_steps}"
        candidate = self._candidate.version if self._candidate else None
        if version in (self.serving, candidate):  # from a training run that restarted at step zero
            path.unlink(missing_ok=True)
            return
        self._drafter_dir.assign_version(path, version)
        if self._queued is not None and self._queued.is_external:
            self._drafter_dir.delete(version)
        else:
            self._queue_candidate(Candidate(version=version, is_external=False))

    async def poll(self, snapshot: Snapshot | None) -> None:
        if self._is_asleep():
            return
        self._snapshot = snapshot
        if self._test is not None:
            await self._advance_test(self._test)
        elif self._queued is not None:
            await self._start_test(self._queued)

    def _queue_candidate(self, candidate: Candidate) -> None:
        if self._queued is not None and self._queued.version != candidate.version:
            self._drafter_dir.delete(self._queued.version)
        self._queued = candidate

    async def _start_test(self, candidate: Candidate) -> None:
        # Set before loading, so that nothing else is submitted meanwhile.
        self._candidate, self._queued = candidate, None
        self._last_counts = {} if self._snapshot is None else _first_token_counts(self._snapshot)
        if await self._serve(candidate.version, on_trial=True):
            self._test = AbTest()
        else:
            self._finish(candidate, "failed")

    async def _advance_test(self, trial: AbTest) -> None:
        candidate = self._candidate
        assert candidate is not None, "on trial"
        side = trial.side
        versions = {"new": candidate.version, "old": self.serving}
        outcome = trial.update(*self._new_counts(versions[side]))
        if outcome == side:
            return
        if outcome == "promoted":
            await self._promote(candidate)
        elif outcome == "rolled_back":
            await self._serve(self.serving, on_trial=False)
            self._finish(candidate, "rolled_back")
        elif not await self._serve(versions[outcome], on_trial=True):
            await self._serve(self.serving, on_trial=False)
            self._finish(candidate, "failed")

    async def _promote(self, candidate: Candidate) -> None:
        if not await self._serve(candidate.version, on_trial=False):
            await self._serve(self.serving, on_trial=False)
            self._finish(candidate, "failed")
            return
        before, self.serving = self.serving, candidate.version
        self._drafter_dir.set_serving(candidate.version)
        self._drafter_dir.delete(before)
        self._drafter_dir.update_start_link()
        if candidate.is_external:
            self._on_adopted(self._drafter_dir.file(candidate.version))
        self._finish(candidate, "promoted")

    def _finish(self, candidate: Candidate, outcome: DrafterOutcome) -> None:
        log.info("drafter %s: %s", candidate.version, outcome)
        if candidate.version != self.serving:
            self._drafter_dir.delete(candidate.version)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self._candidate = self._test = None

    async def _serve(self, version: str, *, on_trial: bool) -> bool:
        return await self._load(version, self.serving, on_trial)

    def _new_counts(self, version: str) -> tuple[int, int]:
        """Numbers of drafts and of accepted first tokens of a version since the last call."""
        now = _first_token_counts(self._snapshot) if self._snapshot is not None else {}
        drafted, accepted = now.get(version, (0, 0))
        before = self._last_counts.get(version, (0, 0))
        self._last_counts[version] = (drafted, accepted)
        return max(0, drafted - before[0]), max(0, accepted - before[1])


def _first_token_counts(snapshot: Snapshot) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for pair in snapshot["pairs"]:
        drafted, accepted = found.get(pair["drafter"], (0, 0))
        found[pair["drafter"]] = (
            drafted + pair["first_drafted"],
            accepted + pair["first_accepted"],
        )
    return found
