"""Drafter (draft model of speculative decoding): upload, download and status for callers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from coppice.wire.weights import DrafterAcceptance, DrafterAnswer, DrafterTraining
from engine.errors import CheckpointRefused, DrafterRefused
from engine.protocol.optional_features import DRAFT_MODEL, DraftModel, Features
from engine.types.feature_stats import DrafterPairStats
from service.checkpoint_store import CheckpointStore
from service.errors import NoDrafter, VersionConflict, WeightsRefused


class DrafterManager:
    """Download, upload and status of the draft model that the engine speculates with.

    Stateless: the engine owns the drafter versions, the checkpoint store the uploads.
    """

    def __init__(self, engine: Features, checkpoints: CheckpointStore) -> None:
        self._engine = engine
        self._checkpoints = checkpoints

    def answer(self) -> DrafterAnswer:
        status = self._draft_model().status()
        return DrafterAnswer(
            serving=status.serving,
            candidate=status.candidate,
            acceptance=[_acceptance(pair) for pair in status.pairs],
            num_promoted=status.outcomes.get("promoted", 0),
            num_rolled_back=status.outcomes.get("rolled_back", 0),
            num_failed=status.outcomes.get("failed", 0),
            training=DrafterTraining(
                state=status.training,
                num_steps=status.num_steps,
                num_tokens=status.num_tokens,
                loss=status.loss,
                num_samples_dropped=status.samples_dropped,
            ),
        )

    def serving(self) -> tuple[str, Path]:
        """Version and file path of the drafter that the engine currently uses."""
        drafter = self._draft_model()
        return drafter.status().serving, drafter.file

    async def upload(
        self, version: str, chunks: AsyncIterator[bytes], *, digest: str | None
    ) -> DrafterAnswer:
        """Stream an uploaded draft model to disk, check it, and submit it as the candidate."""
        drafter = self._draft_model()
        upload = await self._checkpoints.receive(chunks, digest)
        try:
            await asyncio.to_thread(drafter.check, upload.path)
            await drafter.submit(upload.path, version)
        except CheckpointRefused as refused:
            raise WeightsRefused(str(refused)) from refused
        except DrafterRefused as refused:
            raise VersionConflict(str(refused)) from refused
        finally:
            self._checkpoints.discard(upload)
        return self.answer()

    def _draft_model(self) -> DraftModel:
        found = self._engine.feature(DRAFT_MODEL)
        if found is None:
            raise NoDrafter()
        return found


def _acceptance(pair: DrafterPairStats) -> DrafterAcceptance:
    return DrafterAcceptance(
        drafter=pair.drafter,
        weights=pair.weights,
        num_draft_tokens=pair.drafted,
        num_accepted_tokens=pair.accepted,
        num_drafts=pair.first_drafted,
        num_first_tokens_accepted=pair.first_accepted,
    )
