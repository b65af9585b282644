"""The drafter of a running engine, and who trains the next one.

Lives beside the service, on its event loop. Once a second it looks at what EngineCore has counted
and at what was trained. Whatever fails here costs drafts or training, never a sample.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any, Final

from vllm.v1.engine.async_llm import AsyncLLM

from engine.drafter.counters import Counted
from engine.drafter.service.checkpoint_dir import Folder
from engine.drafter.service.promotion import Contest
from engine.drafter.service.trainer_process import Tutor
from engine.drafter.trainer.messages import Sample
from engine.drafter.trainer.soft_targets import as_text, recorded
from engine.protocol import Completion, DrafterPair, DrafterStatus, EngineFacts, SampleRequest
from engine.runtime.rpc import answered
from engine.settings import SpeculationSettings
from engine.speculation.lifecycle import measure

log = logging.getLogger(__name__)

TURN_SECONDS: Final = 1.0


class Drafter:
    """Owns the folder and the tutor."""

    def __init__(
        self, settings: SpeculationSettings, folder: Folder, llm: AsyncLLM, facts: EngineFacts
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._llm = llm
        self._facts = facts
        self._contest = Contest(folder, self._load, self._adopted)
        self._tutor: Tutor | None = None
        if settings.drafter_training:
            self._tutor = Tutor(folder.start, folder.path, settings.drafter_trained)
        self._counted: Counted | None = None

    async def begin(self) -> None:
        """Drafts come from here on, at what this machine was measured to take for them."""
        if await self._utility("coppice_draft", self._contest.serving):
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

    @property
    def learns(self) -> bool:
        return self._tutor is not None

    def heard(self, request: SampleRequest, completion: Completion) -> None:
        if self._tutor is not None and self._tutor.takes_one() and completion.versions:
            places = completion.likeliest
            self._tutor.learn(
                Sample(
                    version=completion.versions[-1].version,
                    prompt=list(request.prompt_token_ids),
                    response=completion.token_ids,
                    likeliest=as_text(recorded(places)) if places else "",
                )
            )

    # From and to elsewhere

    @property
    def file(self) -> Path:
        return self._folder.file(self._contest.serving)

    @property
    def start(self) -> Path:
        return self._folder.start

    async def offer(self, path: Path, version: str) -> None:
        await self._contest.offer(path, version)

    def status(self) -> DrafterStatus:
        tutor, counted = self._tutor, self._counted
        return DrafterStatus(
            serving=self._contest.serving,
            candidate=self._contest.challenger,
            pairs=tuple(DrafterPair(**pair) for pair in counted["pairs"]) if counted else (),
            outcomes=dict(self._contest.outcomes),
            training="off" if tutor is None else tutor.state,
            num_steps=tutor.progress.num_steps if tutor else 0,
            num_tokens=tutor.progress.num_tokens if tutor else 0,
            loss=tutor.progress.loss if tutor else 0.0,
            samples_dropped=tutor.num_dropped if tutor else 0,
        )

    async def _turn(self) -> None:
        published = self._tutor.take_published() if self._tutor is not None else None
        if published is not None:
            self._contest.published(Path(published.path), published.num_steps)
        await self._contest.turn(self._counted)

    def _adopted(self, file: Path) -> None:
        if self._tutor is not None:
            self._tutor.adopt(file)

    async def _load(self, version: str, previous: str, on_trial: bool) -> bool:
        paths = (str(self._folder.file(version)), str(self._folder.file(previous)))
        answers = await self._utility("coppice_serve_drafter", *paths, version, on_trial)
        failed = [answer["error"] for answer in answers if not answer["ok"]]
        if failed:
            log.error("drafter %s could not be loaded: %s", version, failed[0])
        return not failed

    async def _utility(self, method: str, *arguments: Any) -> Any:
        call = self._llm.engine_core.call_utility_async(method, *arguments)
        return await answered(self._llm, call)
