"""Controller of the draft model in the service's process: promotion and training.

It runs in the service process, on its event loop, and once a second polls the counters of
EngineCore and the trainer. A failure here costs drafts or training, never a sample.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from vllm.v1.engine.async_llm import AsyncLLM

from engine.drafter.acceptance_by_version import Snapshot
from engine.drafter.service.checkpoint_dir import DrafterDir
from engine.drafter.service.promotion import DrafterPromotion
from engine.drafter.service.trainer_process import TrainerProcess
from engine.drafter.trainer.messages import TOP_K, Sample, encode_top_k, top_k_of
from engine.runtime.await_engine import await_engine
from engine.speculation.settings import SpeculationSettings
from engine.speculation.startup import measure_baseline, measure_step_costs
from engine.types.feature_stats import DrafterPairStats, DrafterStatus
from engine.types.info import EngineInfo
from engine.types.samples import Completion, SampleRequest
from engine.weights.checkpoint import read_base_checkpoint
from engine.weights.validation import check_checkpoint

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0
BUSY_SHARE: Final = 0.5
"""Load above which training is paused: running samples divided by engine.max_sequences.

Up to it the device has time left between steps.
"""


class Drafter:
    """Drafter of a running engine; owns the drafter directory and the trainer process."""

    def __init__(
        self,
        settings: SpeculationSettings,
        drafter_dir: DrafterDir,
        llm: AsyncLLM,
        info: EngineInfo,
        is_asleep: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._drafter_dir = drafter_dir
        self._llm = llm
        self._info = info
        self._checkpoint = read_base_checkpoint(drafter_dir.start)
        self._promotion = DrafterPromotion(drafter_dir, self._load, self._on_adopted, is_asleep)
        self._trainer: TrainerProcess | None = None
        if settings.drafter_training:
            self._trainer = TrainerProcess(drafter_dir.start, drafter_dir.path)
        self._snapshot: Snapshot | None = None

    async def start_drafting(self) -> None:
        """Start drafting, with step costs measured on this machine, and start the trainer."""
        await measure_baseline(self._llm, self._info, self._settings.longest_draft)
        if await self._utility("coppice_start_drafting", self._promotion.serving):
            await measure_step_costs(self._llm, self._info, self._settings.longest_draft)
            await self._utility("coppice_finish_drafter_profile")
        if self._trainer is not None:
            await self._trainer.start()

    async def close(self) -> None:
        if self._trainer is not None:
            await self._trainer.stop()

    async def run(self) -> None:
        """Poll counters and trainer until cancelled; after a failure the drafter in use stays."""
        try:
            while True:
                await asyncio.sleep(POLL_SECONDS)
                await self._poll()
        except Exception:
            log.exception("drafter A/B tests and training stopped")
            await self.close()

    def on_ping(self, snapshot: Snapshot | None, num_running: int) -> None:
        self._snapshot = snapshot
        if self._trainer is not None:
            share = num_running / self._info.max_sequences
            self._trainer.pause(share > BUSY_SHARE)

    @property
    def is_training(self) -> bool:
        return self._trainer is not None

    def on_sample_finished(self, request: SampleRequest, completion: Completion) -> None:
        if self._trainer is not None and self._trainer.accepts_sample() and completion.versions:
            token_top_logprobs = completion.top_logprobs
            self._trainer.send_sample(
                Sample(
                    version=completion.versions[-1].version,
                    prompt=list(request.prompt_token_ids),
                    response=completion.token_ids,
                    top_logprobs=encode_top_k(top_k_of(token_top_logprobs.columns(TOP_K)))
                    if token_top_logprobs is not None
                    else "",
                )
            )

    # Import, export and status.

    @property
    def file(self) -> Path:
        return self._drafter_dir.file(self._promotion.serving)

    def check(self, path: Path) -> None:
        """Raise CheckpointRefused if the file could not be served as this draft model."""
        check_checkpoint(self._checkpoint, path, dtype=self._info.dtype)

    async def submit(self, path: Path, version: str) -> None:
        await self._promotion.submit(path, version)

    def status(self) -> DrafterStatus:
        trainer, snapshot = self._trainer, self._snapshot
        return DrafterStatus(
            serving=self._promotion.serving,
            candidate=self._promotion.candidate_version,
            pairs=tuple(DrafterPairStats(**pair) for pair in snapshot["pairs"]) if snapshot else (),
            outcomes=dict(self._promotion.outcomes),
            training="off" if trainer is None else trainer.state,
            num_steps=trainer.progress.num_steps if trainer else 0,
            num_tokens=trainer.progress.num_tokens if trainer else 0,
            loss=trainer.progress.loss if trainer else 0.0,
            samples_dropped=trainer.num_dropped if trainer else 0,
        )

    async def _poll(self) -> None:
        published = self._trainer.take_published() if self._trainer is not None else None
        if published is not None:
            self._promotion.published(Path(published.path), published.num_steps)
        await self._promotion.poll(self._snapshot)

    def _on_adopted(self, file: Path) -> None:
        if self._trainer is not None:
            self._trainer.adopt(file)

    async def _load(self, version: str, previous: str, on_trial: bool) -> bool:
        paths = (str(self._drafter_dir.file(version)), str(self._drafter_dir.file(previous)))
        answers = await self._utility("coppice_set_drafter", *paths, version, on_trial)
        failed = [answer["error"] for answer in answers if not answer["ok"]]
        if failed:
            log.error("drafter %s could not be loaded: %s", version, failed[0])
        return not failed

    async def _utility(self, method: str, *arguments: Any) -> Any:
        call = self._llm.engine_core.call_utility_async(method, *arguments)
        return await await_engine(self._llm, call)
