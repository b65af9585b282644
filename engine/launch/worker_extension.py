"""Worker extension class of vLLM (`worker_extension_cls`): info, counters, sleep, features.

A method that the service calls never raises. Under tensor parallelism vLLM stops reading results at
the first rank that raises, and the next call would read the remaining ones. So errors are returned
as values. For the same reason `collective_rpc` must not be given a timeout.
"""

import os
from typing import Any, TypedDict

import torch

from engine import features
from engine.launch.worker_weight_methods import WeightMethods
from engine.runtime.feature_guard import Failure, attempt
from engine.types.samples import SleepLevel, SleepTag
from engine.weights import worker_sleep


class WorkerInfo(TypedDict):
    pid: int
    rank: int
    num_threads: int
    affinity: list[int]


class WorkerExtension(WeightMethods):
    """Mixin of vLLM's worker class, whose attributes it uses. Method names begin with coppice.

    The methods of features are added below.
    """

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

    def coppice_counters(self) -> dict[str, Any]:
        """Counters of the features, by feature."""
        return features.worker_counts()

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


for method in features.worker_methods():
    setattr(WorkerExtension, method.__name__, method)


def _reason(outcome: object) -> str | None:
    return outcome.message if isinstance(outcome, Failure) else None
