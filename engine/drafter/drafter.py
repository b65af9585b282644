"""The drafters of a running engine: which one serves, which is on trial, and who trains them.

Lives beside the service, on its event loop. Once a second it looks at what EngineCore has counted
and moves the trial on. Whatever fails here costs drafts or training, never a sample.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm.v1.engine.async_llm import AsyncLLM

from engine.calls import answered
from engine.drafter.counts import Counted
from engine.drafter.folder import CHECKPOINT, FIRST, Folder
from engine.drafter.training.messages import Sample
from engine.drafter.trial import Trial
from engine.drafter.tutor import Tutor
from engine.errors import DrafterRefused
from engine.protocol import (
    Completion,
    DrafterOutcome,
    DrafterPair,
    DrafterStatus,
    EngineFacts,
    SampleRequest,
)
from engine.settings import SpeculationSettings
from engine.speculation.start import measure

log = logging.getLogger(__name__)

TURN_SECONDS: Final = 1.0
TRAINED: Final = "trained-"
OWN: Final = (TRAINED, "published-")
"""How versions and files of our own begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """`offered`: it was trained elsewhere."""

    version: str
    offered: bool


class Drafter:
    """Owns the folder and the tutor."""

    def __init__(
        self, settings: SpeculationSettings, folder: Folder, llm: AsyncLLM, facts: EngineFacts
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._llm = llm
        self._facts = facts
        self._serving = folder.serving or ""
        self._tutor: Tutor | None = None
        if settings.drafter_training:
            self._tutor = Tutor(folder.start, folder.path, settings.drafter_trained)
        self._next: Candidate | None = None
        self._candidate: Candidate | None = None
        self._trial: Trial | None = None
        self._counted: Counted | None = None
        self._seen: dict[str, tuple[int, int]] = {}
        self._outcomes: dict[DrafterOutcome, int] = {}

    async def begin(self) -> None:
        """Drafts come from here on, at what this machine was measured to take for them."""
        if await self._utility("coppice_draft", self._serving):
            await measure(self._llm, self._facts, self._settings.longest_draft)
            await self._utility("coppice_drafter_profiled")
        if self._tutor is not None:
            await self._tutor.start()

    async def close(self) -> None:
        if self._tutor is not None:
            await self._tutor.stop()

    async def run(self) -> None:
        """Until cancelled, or until it fails: then the drafter that serves goes on serving."""
        try:
            while True:
                await asyncio.sleep(TURN_SECONDS)
                await self._turn()
        except Exception:
            log.exception("drafters are not compared any more, nor trained")
            await self.close()

    def pinged(self, counted: Counted | None, num_running: int) -> None:
        self._counted = counted
        if self._tutor is not None:
            share = num_running / self._facts.max_sequences
            self._tutor.pause(share > self._settings.drafter_busy_share)

    def heard(self, request: SampleRequest, completion: Completion) -> None:
        if self._tutor is not None and completion.versions:
            self._tutor.learn(
                Sample(
                    version=completion.versions[-1].version,
                    prompt=list(request.prompt_token_ids),
                    response=completion.token_ids,
                )
            )

    # From and to elsewhere

    @property
    def file(self) -> Path:
        return self._folder.file(self._serving)

    @property
    def start(self) -> Path:
        return self._folder.start

    def offer(self, path: Path, version: str) -> None:
        """Takes the file, which was checked, for the next trial."""
        if version in (self._serving, FIRST, CHECKPOINT) or version.startswith(OWN):
            raise DrafterRefused("the version exists, or has a name that is the server's own")
        if any(known is not None and known.offered for known in (self._next, self._candidate)):
            raise DrafterRefused("another drafter waits for its trial, or is on trial")
        self._folder.take(path, version)
        self._put_next(Candidate(version=version, offered=True))

    def status(self) -> DrafterStatus:
        tutor, counted = self._tutor, self._counted
        known = self._candidate or self._next
        return DrafterStatus(
            serving=self._serving,
            candidate=None if known is None else known.version,
            pairs=tuple(DrafterPair(**pair) for pair in counted["pairs"]) if counted else (),
            outcomes=dict(self._outcomes),
            training="off" if tutor is None else tutor.state,
            num_steps=tutor.progress.num_steps if tutor else 0,
            num_tokens=tutor.progress.num_tokens if tutor else 0,
            loss=tutor.progress.loss if tutor else 0.0,
            samples_dropped=tutor.num_dropped if tutor else 0,
        )

    # The trial

    async def _turn(self) -> None:
        self._take_published()
        if self._trial is not None:
            await self._move_on(self._trial)
        elif self._next is not None:
            await self._begin_trial()

    def _take_published(self) -> None:
        published = self._tutor.take_published() if self._tutor is not None else None
        if published is None:
            return
        version = f"{TRAINED}{published.num_steps}"
        candidate = self._candidate.version if self._candidate else None
        if version in (self._serving, candidate):  # of a run that began again from the first step
            Path(published.path).unlink(missing_ok=True)
            return
        self._folder.take(Path(published.path), version)
        if self._next is not None and self._next.offered:
            self._folder.drop(version)
        else:
            self._put_next(Candidate(version=version, offered=False))

    def _put_next(self, candidate: Candidate) -> None:
        if self._next is not None:
            self._folder.drop(self._next.version)
        self._next = candidate

    async def _begin_trial(self) -> None:
        candidate, self._next = self._next, None
        assert candidate is not None, "one waits"
        self._candidate = candidate  # while it is loaded nothing else may be offered
        self._first_counts()
        if await self._serve(candidate.version, on_trial=True):
            self._trial = Trial()
        else:
            self._ended(candidate, "failed")

    async def _move_on(self, trial: Trial) -> None:
        candidate = self._candidate
        assert candidate is not None, "on trial"
        side = trial.side
        versions = {"new": candidate.version, "old": self._serving}
        outcome = trial.observed(*self._since_last(versions[side]))
        if outcome == side:
            return
        if outcome == "promoted":
            await self._promote(candidate)
        elif outcome == "rolled_back":
            await self._serve(self._serving, on_trial=False)
            self._ended(candidate, "rolled_back")
        elif not await self._serve(versions[outcome], on_trial=True):
            await self._serve(self._serving, on_trial=False)
            self._ended(candidate, "failed")

    async def _promote(self, candidate: Candidate) -> None:
        if not await self._serve(candidate.version, on_trial=False):
            await self._serve(self._serving, on_trial=False)
            self._ended(candidate, "failed")
            return
        before, self._serving = self._serving, candidate.version
        self._folder.settle(candidate.version)
        self._folder.drop(before)
        self._folder.refresh_start()
        if candidate.offered and self._tutor is not None:
            self._tutor.adopt(self._folder.file(candidate.version))
        self._ended(candidate, "promoted")

    def _ended(self, candidate: Candidate, outcome: DrafterOutcome) -> None:
        log.info("drafter %s: %s", candidate.version, outcome)
        if candidate.version != self._serving:
            self._folder.drop(candidate.version)
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        self._candidate = self._trial = None

    def _first_counts(self) -> None:
        counted = self._counted
        self._seen = {} if counted is None else _first_tokens(counted)

    def _since_last(self, version: str) -> tuple[int, int]:
        """First tokens drafted and accepted of a version since it was asked last."""
        now = {} if self._counted is None else _first_tokens(self._counted)
        drafted, accepted = now.get(version, (0, 0))
        before = self._seen.get(version, (0, 0))
        self._seen[version] = (drafted, accepted)
        return max(0, drafted - before[0]), max(0, accepted - before[1])

    async def _serve(self, version: str, *, on_trial: bool) -> bool:
        """The file of whatever is loaded now is there until this is over."""
        paths = (str(self._folder.file(version)), str(self._folder.file(self._serving)))
        answers = await self._utility("coppice_serve_drafter", *paths, version, on_trial)
        failed = [answer["error"] for answer in answers if not answer["ok"]]
        if failed:
            log.error("drafter %s could not be loaded: %s", version, failed[0])
        return not failed

    async def _utility(self, method: str, *arguments: Any) -> Any:
        call = self._llm.engine_core.call_utility_async(method, *arguments)
        return await answered(self._llm, call)


def _first_tokens(counted: Counted) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for pair in counted["pairs"]:
        drafted, accepted = found.get(pair["drafter"], (0, 0))
        found[pair["drafter"]] = (
            drafted + pair["first_drafted"],
            accepted + pair["first_accepted"],
        )
    return found
