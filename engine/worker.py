"""What the service can ask of a worker: methods that vLLM mixes into its worker class.

What the service calls never raises: under tensor parallelism vLLM stops reading answers at the
first rank that raises, and the next call reads the answers that were left. So an error is a value.
For the same reason `collective_rpc` must not be given a timeout.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from vllm.distributed.parallel_state import get_world_group

from engine.attention.counts import COUNTS, Counted
from engine.guard import Failure, attempt
from engine.kv import support
from engine.kv.support import KvAnswer
from engine.weights import reload
from engine.weights.checkpoint import HEAD, Checkpoint, read_checkpoint, refuse_differences


class WorkerInfo(TypedDict):
    pid: int
    rank: int
    num_threads: int
    affinity: list[int]


class Loaded(TypedDict):
    ok: Literal[True]
    num_tensors: int
    seconds: float


class NotLoaded(TypedDict):
    """`restored`: every rank has the previous weights again; if not, nothing may run."""

    ok: Literal[False]
    error: str
    restored: bool


class WorkerExtension:
    """Mixed into vLLM's worker, whose attributes it uses; every name has our prefix."""

    rank: int
    model_runner: Any
    model_config: Any
    vllm_config: Any

    def coppice_info(self) -> WorkerInfo:
        return WorkerInfo(
            pid=os.getpid(),
            rank=self.rank,
            num_threads=torch.get_num_threads(),
            affinity=sorted(os.sched_getaffinity(0)),
        )

    def coppice_shared_prefix(self) -> Counted:
        return COUNTS.read()

    def coppice_load_weights(self, path: str, previous_path: str) -> Loaded | NotLoaded:
        """Load the checked files at `path` into the paused model, on every rank or on none.

        Nothing is touched before both indexes are read on every rank: the files may have changed
        since the check, and there must be a way back. If a rank fails later, all go back.
        """
        begun = time.monotonic()
        indexes = attempt(self.coppice_indexes, path, previous_path)
        if failed := _failed_ranks(isinstance(indexes, Failure)):
            return _not_loaded(indexes, failed, restored=True)
        assert not isinstance(indexes, Failure)
        checkpoint, previous = indexes
        loaded = attempt(self.coppice_load, checkpoint)
        if failed := _failed_ranks(isinstance(loaded, Failure)):
            restored = attempt(self.coppice_restore, previous)
            everywhere = not _failed_ranks(isinstance(restored, Failure))
            return _not_loaded(loaded, failed, restored=everywhere)
        seconds = time.monotonic() - begun
        return Loaded(ok=True, num_tensors=len(checkpoint.tensors), seconds=seconds)

    def coppice_prepare_exports(self) -> KvAnswer | str:
        """What this rank exports, or why it does not."""
        answer = attempt(support.prepare, self.vllm_config)
        return answer.message if isinstance(answer, Failure) else answer

    def coppice_settle_exports(self) -> bool:
        return not isinstance(attempt(support.settle), Failure)

    def coppice_indexes(self, path: str, previous_path: str) -> tuple[Checkpoint, Checkpoint]:
        checkpoint, previous = self.coppice_index(path), self.coppice_index(previous_path)
        refuse_differences(previous, checkpoint)
        return checkpoint, previous

    def coppice_index(self, path: str) -> Checkpoint:
        """What the model reads of a checkpoint: all of it, but for a head that it ties."""
        checkpoint = read_checkpoint(Path(path), follow_links=True)
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        return checkpoint.without(HEAD) if tied else checkpoint

    def coppice_load(self, checkpoint: Checkpoint) -> None:
        reload.load(self, self.coppice_tensors(checkpoint))

    def coppice_restore(self, previous: Checkpoint) -> None:
        reload.reset(self)
        self.coppice_load(previous)

    def coppice_tensors(self, checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
        return reload.read_tensors(checkpoint)


def _not_loaded(outcome: object, failed_ranks: list[int], *, restored: bool) -> NotLoaded:
    error = outcome.message if isinstance(outcome, Failure) else f"failed on ranks {failed_ranks}"
    return NotLoaded(ok=False, error=error, restored=restored)


def _failed_ranks(failed: bool) -> list[int]:
    """Every rank learns which ranks failed. All have to call it, as often as each other."""
    world = get_world_group()
    if world.world_size == 1:
        return [world.rank] if failed else []
    flags = torch.zeros(world.world_size, dtype=torch.int32, device="cpu")
    flags[world.rank_in_group] = failed
    torch.distributed.all_reduce(flags, group=world.cpu_group)
    return [world.ranks[i] for i in range(world.world_size) if flags[i]]
