"""Methods that vLLM mixes into its worker class, for calls by the service.

A method that the service calls never raises. Under tensor parallelism vLLM stops reading results at
the first rank that raises, and the next call would read the remaining ones. So errors are returned
as values. For the same reason `collective_rpc` must not be given a timeout.
"""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.lora.request import LoRARequest

from engine.attention import counters as attention
from engine.attention import register
from engine.cudagraphs.counters import COUNTERS as GRAPHS
from engine.cudagraphs.counters import Snapshot as CudaGraphSnapshot
from engine.feature_stats import AttentionState
from engine.kv_transfer.worker import rpc
from engine.kv_transfer.worker.rpc import KvExportInfo
from engine.launch.worker_machines import MachineMethods
from engine.runtime.feature_guard import Failure, attempt
from engine.speculation import counters as speculation
from engine.speculation.drafting import CallTexts
from engine.types import SleepLevel, SleepTag
from engine.weights import worker_reload, worker_sleep
from engine.weights.checkpoint import LM_HEAD, Checkpoint, check_same_tensors, read_checkpoint
from engine.weights.worker_copies import COPIES

ASLEEP: Final = "the engine sleeps"


class WorkerInfo(TypedDict):
    pid: int
    rank: int
    num_threads: int
    affinity: list[int]


class Snapshot(TypedDict):
    shared_prefix: attention.Snapshot
    speculation: speculation.Snapshot
    graphs: CudaGraphSnapshot | None


class LoadSuccess(TypedDict):
    """Result of a load. `num_bytes` is what this rank used of the checkpoint."""

    ok: Literal[True]
    num_tensors: int
    num_bytes: int
    seconds: float


class LoadFailure(TypedDict):
    """Result of a failed load of weights or of a drafter.

    `restored`: every rank has the previous weights again; otherwise the engine must not run.
    """

    ok: Literal[False]
    error: str
    restored: bool


class WorkerExtension(MachineMethods):
    """Mixin of vLLM's worker class, whose attributes it uses. Method names begin with coppice."""

    rank: int
    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: torch.device
    coppice_sleeping: frozenset[SleepTag] = frozenset()

    def coppice_info(self) -> WorkerInfo:
        return WorkerInfo(
            pid=os.getpid(),
            rank=self.rank,
            num_threads=torch.get_num_threads(),
            affinity=sorted(os.sched_getaffinity(0)),
        )

    def coppice_counters(self) -> Snapshot:
        return Snapshot(
            shared_prefix=attention.COUNTERS.read(),
            speculation=speculation.COUNTERS.read(),
            graphs=GRAPHS.read(),
        )

    def coppice_attention_state(self) -> AttentionState:
        """State of shared-prefix attention, once the model is loaded."""
        state = attempt(register.state)
        return "failed" if isinstance(state, Failure) else state

    def coppice_start_speculation(self) -> bool:
        """Attach the draft proposer; returns whether a profile of step times must be measured."""
        return attempt(self.coppice_attach_proposer) is True

    def coppice_finish_profile(self) -> bool:
        return not isinstance(attempt(self.coppice_apply_profile), Failure)

    def coppice_save_drafts(self) -> bool:
        return not isinstance(attempt(self.coppice_write_drafts), Failure)

    def coppice_add_drafts(self, texts: CallTexts) -> int:
        """Add texts of other engines to the draft store; returns the number of responses added."""
        added = attempt(self.coppice_store_texts, texts)
        return 0 if isinstance(added, Failure) else added

    def coppice_reset_graph_counters(self) -> CudaGraphSnapshot | None:
        """Reset the CUDA graph counters, after the warm-up steps."""
        GRAPHS.reset()
        return GRAPHS.read()

    def coppice_load_weights(self, path: str, previous_path: str) -> LoadSuccess | LoadFailure:
        """Load validated weights into the paused model, on every rank or on none.

        Both checkpoints are indexed on every rank before any weight changes: the files may have
        changed since validation, and the previous weights must be readable. If a rank fails later,
        all ranks restore the previous weights.
        """
        answer = self.coppice_load_or_restore(
            COPIES.local_path(path), COPIES.local_path(previous_path)
        )
        if answer["ok"]:
            self.coppice_on_weights_changed()
        return answer

    def coppice_load_drafter(self, path: str, previous_path: str) -> LoadSuccess | LoadFailure:
        """Load weights into the drafter, on every rank or on none.

        No pause is needed, because drafts are verified. Refused while the engine sleeps.
        """
        if self.coppice_sleeping:
            return LoadFailure(ok=False, error=ASLEEP, restored=True)
        return self.coppice_load_or_restore(path, previous_path, drafter=True)

    def coppice_load_or_restore(
        self, path: str, previous_path: str, *, drafter: bool = False
    ) -> LoadSuccess | LoadFailure:
        begun = time.monotonic()
        indexes = attempt(self.coppice_read_checkpoints, path, previous_path, drafter=drafter)
        if failed := _failed_ranks(isinstance(indexes, Failure)):
            return _load_failure(indexes, failed, restored=True)
        assert not isinstance(indexes, Failure)
        checkpoint, previous = indexes
        loaded = attempt(self.coppice_load, checkpoint, drafter=drafter)
        if failed := _failed_ranks(isinstance(loaded, Failure)):
            restored = attempt(self.coppice_restore, previous, drafter=drafter)
            is_restored = not _failed_ranks(isinstance(restored, Failure))
            return _load_failure(loaded, failed, restored=is_restored)
        assert isinstance(loaded, int)
        seconds, num_tensors = time.monotonic() - begun, len(checkpoint.tensors)
        return LoadSuccess(ok=True, num_tensors=num_tensors, num_bytes=loaded, seconds=seconds)

    def coppice_load_adapter(self, name: str, number: int, path: str) -> str | None:
        """Load an adapter on every rank or on none. Returns None, or the reason of the failure."""
        if self.coppice_sleeping:
            return ASLEEP
        request = LoRARequest(name, number, COPIES.local_path(path))
        loaded = attempt(self.model_runner.add_lora, request)
        if failed := _failed_ranks(isinstance(loaded, Failure)):
            attempt(self.model_runner.remove_lora, number)
            return loaded.message if isinstance(loaded, Failure) else f"failed on ranks {failed}"
        return None

    def coppice_sleep(self, level: SleepLevel, tags: list[SleepTag]) -> str | None:
        """Release memory with these tags. Returns None, or the reason of a failure."""
        self.coppice_sleeping = self.coppice_sleeping | set(tags)
        return _reason(attempt(worker_sleep.sleep, self, level, set(tags)))

    def coppice_missing_bytes(self, tags: list[SleepTag]) -> int | None:
        """Memory that a wake needs beyond what is free, in bytes; None if that is not known."""
        missing = attempt(worker_sleep.missing_bytes, self, set(tags))
        return None if isinstance(missing, Failure) else missing

    def coppice_wake(self, tags: list[SleepTag]) -> str | None:
        """Allocate memory with these tags again. Returns None, or the reason of a failure."""
        outcome = attempt(worker_sleep.wake, self, set(tags))
        self.coppice_sleeping = self.coppice_sleeping - set(tags)
        return _reason(outcome)

    def coppice_unload_adapter(self, number: int) -> bool:
        return not isinstance(attempt(self.model_runner.remove_lora, number), Failure)

    def coppice_prepare_kv_export(
        self, gpu_bytes: int = 0, nixl: bool = False
    ) -> KvExportInfo | str:
        """Prepare prompt KV exports. Returns their format, or why this rank cannot export.

        The rank takes `gpu_bytes` of GPU memory for KV that stays there; `nixl` serves it by RDMA.
        """
        answer = attempt(
            rpc.prepare,
            self.vllm_config,
            self.model_runner.model,
            gpu_bytes=gpu_bytes,
            nixl=nixl,
        )
        return answer.message if isinstance(answer, Failure) else answer

    def coppice_flush_exports(self) -> bool:
        return not isinstance(attempt(rpc.flush), Failure)

    def coppice_release_kv_pages(self, arena: str, page_epoch: int) -> bool:
        return not isinstance(attempt(rpc.release_pages, Path(arena), page_epoch), Failure)

    def coppice_attach_proposer(self) -> bool:
        """Attach the draft proposer on rank 0, whose drafts are used by all ranks.

        All ranks sample identically, with the same hooks in their model runners.
        """
        self.model_runner.drafter.install(self.model_runner)
        if self.rank != 0:
            return False
        self.model_runner.drafter.attach(self.model_runner)
        return bool(self.model_runner.drafter.begin_profile())

    def coppice_apply_profile(self) -> None:
        if self.rank == 0:
            self.model_runner.drafter.end_profile()

    def coppice_write_drafts(self) -> None:
        if self.rank == 0:
            self.model_runner.drafter.save()

    def coppice_store_texts(self, texts: CallTexts) -> int:
        return self.model_runner.drafter.add_texts(texts) if self.rank == 0 else 0

    def coppice_on_weights_changed(self) -> None:
        """Notify the drafter that earlier text was sampled under other weights."""
        drafter = getattr(self.model_runner, "drafter", None)
        if drafter is not None and hasattr(drafter, "on_weights_changed"):
            attempt(drafter.on_weights_changed)

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


def _reason(outcome: object) -> str | None:
    return outcome.message if isinstance(outcome, Failure) else None


def _load_failure(outcome: object, failed_ranks: list[int], *, restored: bool) -> LoadFailure:
    error = outcome.message if isinstance(outcome, Failure) else f"failed on ranks {failed_ranks}"
    return LoadFailure(ok=False, error=error, restored=restored)


def _failed_ranks(failed: bool) -> list[int]:
    """Gather on every rank which ranks failed. All ranks must call it equally often."""
    world = get_world_group()
    if world.world_size == 1:
        return [world.rank] if failed else []
    flags = torch.zeros(world.world_size, dtype=torch.int32, device="cpu")
    flags[world.rank_in_group] = failed
    torch.distributed.all_reduce(flags, group=world.cpu_group)
    return [world.ranks[i] for i in range(world.world_size) if flags[i]]
