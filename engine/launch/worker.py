"""Methods that vLLM mixes into its worker class, for calls by the service.

A method that the service calls never raises. Under tensor parallelism vLLM stops reading results at
the first rank that raises, and the next call would read the remaining ones. So errors are returned
as values. For the same reason `collective_rpc` must not be given a timeout.
"""

import os
from typing import Any, TypedDict

import torch
from vllm.lora.request import LoRARequest

from engine.attention import counters as attention
from engine.attention import register
from engine.cudagraphs.counters import COUNTERS as GRAPHS
from engine.cudagraphs.counters import Snapshot as CudaGraphSnapshot
from engine.feature_stats import AttentionState
from engine.kv_transfer.worker import rpc
from engine.kv_transfer.worker.rpc import KvExportInfo
from engine.launch.worker_weights import ASLEEP, WeightMethods, failed_ranks
from engine.runtime.feature_guard import Failure, attempt
from engine.speculation import counters as speculation
from engine.types import SleepLevel, SleepTag
from engine.weights import worker_sleep


class WorkerInfo(TypedDict):
    pid: int
    rank: int
    num_threads: int
    affinity: list[int]


class Snapshot(TypedDict):
    shared_prefix: attention.Snapshot
    speculation: speculation.Snapshot
    graphs: CudaGraphSnapshot | None


class WorkerExtension(WeightMethods):
    """Mixin of vLLM's worker class, whose attributes it uses. Method names begin with coppice."""

    rank: int
    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: torch.device

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
        state = attempt(register.state, self.model_runner)
        return "failed" if isinstance(state, Failure) else state

    def coppice_start_speculation(self) -> bool:
        """Attach the draft proposer; returns whether a profile of step times must be measured."""
        return attempt(self.coppice_attach_proposer) is True

    def coppice_finish_profile(self) -> bool:
        return not isinstance(attempt(self.coppice_apply_profile), Failure)

    def coppice_reset_graph_counters(self) -> CudaGraphSnapshot | None:
        """Reset the CUDA graph counters, after the warm-up steps."""
        GRAPHS.reset()
        return GRAPHS.read()

    def coppice_load_adapter(self, name: str, number: int, path: str) -> str | None:
        """Load an adapter on every rank or on none. Returns None, or the reason of the failure."""
        if self.coppice_sleeping:
            return ASLEEP
        request = LoRARequest(name, number, path)
        loaded = attempt(self.model_runner.add_lora, request)
        if failed := failed_ranks(isinstance(loaded, Failure)):
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

    def coppice_prepare_kv_export(self, gpu_bytes: int = 0) -> KvExportInfo | str:
        """Prepare prompt KV exports. Returns their format, or why this rank cannot export.

        The rank takes `gpu_bytes` of GPU memory for KV that stays there.
        """
        answer = attempt(
            rpc.prepare,
            self.vllm_config,
            self.model_runner.model,
            gpu_bytes=gpu_bytes,
        )
        return answer.message if isinstance(answer, Failure) else answer

    def coppice_flush_exports(self) -> bool:
        return not isinstance(attempt(rpc.flush), Failure)

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


def _reason(outcome: object) -> str | None:
    return outcome.message if isinstance(outcome, Failure) else None
