"""Counters of the workers, read by a heartbeat, with futures of vLLM's multiprocess executor."""

from collections import deque
from typing import Any

from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor

from engine.launch.engine_core_methods import WorkerCounters


class Workers(MultiprocExecutor):  # type: ignore[misc]
    """Workers that reply in the order of calls; `log` has what was waited for."""

    def __init__(self) -> None:
        self.futures_queue: deque[FutureWrapper] = deque()
        self.log: list[str] = []
        self.num_calls = 0

    def step(self) -> FutureWrapper:
        return FutureWrapper(self.futures_queue, lambda: self.log.append("step"))

    def collective_rpc(self, method: Any, *args: Any, non_block: bool = False, **_: Any) -> Any:
        assert method == "coppice_counters"
        self.num_calls += 1
        number = self.num_calls

        def replies() -> list[int]:
            self.log.append("counters")
            return [number]

        future = FutureWrapper(self.futures_queue, replies)
        return future if non_block else future.result()

    def shutdown(self) -> None: ...


def read(counters: WorkerCounters, workers: Any, *, in_progress: bool) -> Any:
    return counters.read(workers, in_progress=in_progress)


def test_steps_in_progress_are_not_waited_for() -> None:
    workers, counters = Workers(), WorkerCounters()
    assert read(counters, workers, in_progress=False) == [1]
    workers.log.clear()
    workers.step()
    assert read(counters, workers, in_progress=True) == [1]
    assert read(counters, workers, in_progress=True) == [1]
    assert workers.log == [] and workers.num_calls == 2
    workers.step().result()  # the engine waits for a later step
    assert workers.log == ["step", "counters", "step"]
    assert read(counters, workers, in_progress=True) == [2] and workers.num_calls == 3


def test_idle_workers_are_waited_for() -> None:
    """So that a worker that hangs is noticed."""
    workers, counters = Workers(), WorkerCounters()
    for number in (1, 2, 3):
        assert read(counters, workers, in_progress=False) == [number]


def test_first_counters_are_waited_for() -> None:
    workers = Workers()
    workers.step()
    assert read(WorkerCounters(), workers, in_progress=True) == [1]
    assert workers.log == ["step", "counters"]


def test_answer_that_was_not_taken_before_the_engine_was_idle_is_dropped() -> None:
    workers, counters = Workers(), WorkerCounters()
    read(counters, workers, in_progress=False)
    workers.step()
    read(counters, workers, in_progress=True)
    assert read(counters, workers, in_progress=False) == [3]
    assert read(counters, workers, in_progress=True) == [3]


class OneProcess:
    """Executor whose worker is in the process of EngineCore, so that a call does not wait."""

    def collective_rpc(self, method: str) -> list[int]:
        return [7]


def test_worker_in_the_same_process_is_called_at_once() -> None:
    counters = WorkerCounters()
    assert read(counters, OneProcess(), in_progress=True) == [7]
