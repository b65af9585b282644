"""Worker methods that load weights from files or a trainer's GPU, on all ranks or on none."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import torch

from engine import features
from engine.launch.ranks.worker_machines import MachineMethods
from engine.runtime.feature_guard import Failure, attempt
from engine.types.samples import SleepTag
from engine.weights import worker_reload, worker_transfer
from engine.weights.checkpoint import LM_HEAD, Checkpoint, check_same_tensors, read_checkpoint
from engine.weights.ipc_tensors import IpcTensor
from engine.weights.rank_agreement import ASLEEP, failed_ranks

Source = TypeVar("Source")


class LoadSuccess(TypedDict):
    """Result of a load. `num_bytes` is what this rank used of the weights."""

    ok: Literal[True]
    num_bytes: int
    seconds: float


class LoadFailure(TypedDict):
    """Result of a failed load of weights or of a drafter.

    `restored`: every rank has the previous weights again, or those of the previous files if
    `has_reloaded`; otherwise the engine must not run.
    """

    ok: Literal[False]
    error: str
    restored: bool
    has_reloaded: bool


class WeightMethods(MachineMethods):
    """Part of the mixin `WorkerExtension`, which uses the attributes of vLLM's worker."""

    model_runner: Any
    vllm_config: Any
    coppice_sleeping: frozenset[SleepTag] = frozenset()
    coppice_opened: dict[str, torch.Tensor] | None = None

    def coppice_load_weights(self, path: str, previous_path: str) -> LoadSuccess | LoadFailure:
        """Load validated weights into the paused model, on every rank or on none.

        Both checkpoints are indexed on every rank before any weight changes: the files may have
        changed since validation, and the previous weights must be readable. If a rank fails later,
        all ranks restore the previous weights.
        """
        paths = self.coppice_local_path(path), self.coppice_local_path(previous_path)
        answer = self.coppice_load_or_restore(
            lambda: self.coppice_read_checkpoints(*paths), self.coppice_load
        )
        if answer["ok"]:
            features.on_weights_changed(self)
        return answer

    def coppice_load_drafter(self, path: str, previous_path: str) -> LoadSuccess | LoadFailure:
        """Load weights into the drafter, on every rank or on none.

        No pause is needed, because drafts are verified. Refused while the engine sleeps.
        """
        if self.coppice_sleeping:
            return LoadFailure(ok=False, error=ASLEEP, restored=True, has_reloaded=False)
        return self.coppice_load_or_restore(
            lambda: self.coppice_read_checkpoints(path, previous_path, drafter=True),
            lambda checkpoint: self.coppice_load(checkpoint, drafter=True),
            drafter=True,
        )

    def coppice_transfer_obstacle(self) -> str | None:
        """Reason why this worker cannot receive weights in GPU memory, or None."""
        obstacle = attempt(worker_transfer.obstacle, self)
        return obstacle.message if isinstance(obstacle, Failure) else obstacle

    def coppice_open_transfer(self, tensors: Sequence[Mapping[str, Any]]) -> str | None:
        """Open and check tensors in GPU memory of a trainer, on every rank or on none.

        Samples may run. Returns None, or the reason why nothing is open.
        """
        self.coppice_close_transfer()
        opened = attempt(self.coppice_receive, tensors)
        if failed := failed_ranks(isinstance(opened, Failure)):
            return _reason(opened, failed)
        assert not isinstance(opened, Failure)
        self.coppice_opened = opened
        return None

    def coppice_close_transfer(self) -> None:
        """Close the tensors that are open and will not be loaded."""
        self.coppice_opened = None

    def coppice_load_transfer(self, previous_path: str) -> LoadSuccess | LoadFailure:
        """Load the open tensors into the paused model, on every rank or on none, and close them.

        If a rank fails after weights have changed, all ranks load the files at `previous_path`,
        which need not be those of the previous weights.
        """
        path = self.coppice_local_path(previous_path)
        answer = self.coppice_load_or_restore(
            lambda: (self.coppice_take_opened(), self.coppice_read_checkpoint(path)),
            self.coppice_load_received,
        )
        if answer["ok"]:
            features.on_weights_changed(self)
        return answer

    def coppice_take_opened(self) -> dict[str, torch.Tensor]:
        opened, self.coppice_opened = self.coppice_opened, None
        assert opened is not None, "no tensors are open"
        return opened

    def coppice_load_or_restore(
        self,
        prepare: Callable[[], tuple[Source, Checkpoint]],
        load: Callable[[Source], int],
        *,
        drafter: bool = False,
    ) -> LoadSuccess | LoadFailure:
        """Load what `prepare` returns, or else the checkpoint that it returns beside it."""
        begun = time.monotonic()
        prepared = attempt(prepare)
        if failed := failed_ranks(isinstance(prepared, Failure)):
            return _load_failure(prepared, failed, restored=True, has_reloaded=False)
        assert not isinstance(prepared, Failure)
        source, previous = prepared
        loaded = attempt(load, source)
        if failed := failed_ranks(isinstance(loaded, Failure)):
            restored = attempt(self.coppice_restore, previous, drafter=drafter)
            is_restored = not failed_ranks(isinstance(restored, Failure))
            return _load_failure(loaded, failed, restored=is_restored, has_reloaded=is_restored)
        assert isinstance(loaded, int)
        return LoadSuccess(ok=True, num_bytes=loaded, seconds=time.monotonic() - begun)

    def coppice_read_checkpoints(
        self, path: str, previous_path: str, *, drafter: bool = False
    ) -> tuple[Checkpoint, Checkpoint]:
        checkpoint = self.coppice_read_checkpoint(path, drafter=drafter)
        previous = self.coppice_read_checkpoint(previous_path, drafter=drafter)
        check_same_tensors(previous, checkpoint)
        return checkpoint, previous

    def coppice_read_checkpoint(self, path: str, *, drafter: bool = False) -> Checkpoint:
        """Index the tensors of a checkpoint, without a tied head, which the model does not load."""
        checkpoint = read_checkpoint(Path(path), follow_links=True)
        config = self.model_config
        if drafter:
            config = self.vllm_config.speculative_config.draft_model_config
        tied = getattr(config.hf_text_config, "tie_word_embeddings", False)
        return checkpoint.without_tensor(LM_HEAD) if tied else checkpoint

    def coppice_load(self, checkpoint: Checkpoint, *, drafter: bool = False) -> int:
        """Load a checkpoint; returns the number of bytes of it that this rank used."""
        with self.coppice_open_tensors(checkpoint, drafter=drafter) as tensors:
            worker_reload.load(self, tensors, drafter=drafter)
        return worker_reload.num_bytes_loaded(self, drafter=drafter)

    def coppice_restore(self, previous: Checkpoint, *, drafter: bool = False) -> None:
        """Load the previous weights; layers that are never loaded still have them."""
        worker_reload.reset(self, drafter=drafter)
        with self.coppice_open_tensors(previous, drafter=drafter) as tensors:
            worker_reload.load(self, tensors, drafter=drafter, requires_all=False)

    def coppice_open_tensors(
        self, checkpoint: Checkpoint, *, drafter: bool
    ) -> AbstractContextManager[Iterator[tuple[str, torch.Tensor]]]:
        return worker_reload.open_tensors(self, checkpoint, drafter=drafter)

    def coppice_receive(self, tensors: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        parsed = [IpcTensor.from_dict(values) for values in tensors]
        return worker_transfer.receive(self, parsed)

    def coppice_load_received(self, received: dict[str, torch.Tensor]) -> int:
        """Load opened tensors, and close them; returns their number of bytes."""
        num_bytes = sum(tensor.nbytes for tensor in received.values())
        try:
            worker_reload.load(self, received.items())
        finally:
            received.clear()
        return num_bytes


def _load_failure(
    outcome: object, failed: list[int], *, restored: bool, has_reloaded: bool
) -> LoadFailure:
    error = _reason(outcome, failed)
    return LoadFailure(ok=False, error=error, restored=restored, has_reloaded=has_reloaded)


def _reason(outcome: object, failed: list[int]) -> str:
    return outcome.message if isinstance(outcome, Failure) else f"failed on ranks {failed}"
