"""Processor time per token of each stage that a token passes between the model and its caller.

A round starts requests at once and runs them to their end through vLLM's EngineCore, with an
executor without a forward pass, through the encoder and the decoder of its sockets, and through
the output processor of the service. Nothing waits, and only the processor time of the thread
counts, so other processes disturb the result little.

Each side runs in a process of its own: this project's, with its hooks in vLLM, and vLLM's.
"""

import gc
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

from bench.harness.host_path.micro_cases import MicroCase

Side = Literal["ours", "vllm"]
SCHEDULE, EXECUTE, UPDATE, REST = "schedule", "execute", "update_from_output", "rest of the step"
ENCODE, DECODE, PROCESS, ADD = "encode", "decode", "process_outputs", "add_request"
ENGINE_CORE: Final = (SCHEDULE, UPDATE, REST, ENCODE)
SERVICE: Final = (DECODE, PROCESS)
STAGES: Final = (*ENGINE_CORE, *SERVICE)
"""Stages of a token. The executor's own time is not one, because no GPU's is like it."""
CALIBRATION_STEPS, CALIBRATION_ITEMS = 1500, 256
REFERENCE: Final = 0.4
"""Calibration on a Xeon of 2.1 GHz, in microseconds per iteration."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroRound:
    """Microseconds of processor time per token and stage, and per request for `add_request`.

    `calibration` is the time of a fixed loop of Python, in microseconds per iteration. A part of it
    runs after each step.
    """

    stages: Mapping[str, float]
    calibration: float

    def sum(self, stages: Sequence[str] = STAGES) -> float:
        return sum(self.stages[stage] for stage in stages)


class MicroProcess:
    """Process of one side, which runs a round whenever it is asked."""

    def __init__(self, side: Side, model: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        # This project's plugin installs the hooks of EngineCore by the name of the process.
        self._process = context.Process(
            target=_serve, args=(side, model, child), name="EngineCore", daemon=True
        )
        self._process.start()
        child.close()

    def run(self, case: MicroCase) -> MicroRound:
        self._pipe.send(case)
        found: MicroRound = self._pipe.recv()
        return found

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


@contextmanager
def micro_process(side: Side, model: Path) -> Iterator[MicroProcess]:
    process = MicroProcess(side, model)
    try:
        yield process
    finally:
        process.close()


def measure(
    model: Path, cases: Sequence[MicroCase], num_rounds: int
) -> Iterator[tuple[MicroCase, dict[Side, MicroRound]]]:
    """Least times over rounds of both sides, in turn, by case. vLLM has no supports per request."""
    with micro_process("ours", model) as ours, micro_process("vllm", model) as vllm:
        processes: dict[Side, MicroProcess] = {"ours": ours, "vllm": vllm}
        for case in cases:
            sides = [name for name in processes if name == "ours" or not case.has_support]
            rounds: dict[Side, list[MicroRound]] = {name: [] for name in sides}
            for _ in range(1 + num_rounds):  # the first one is the warm-up
                for name in sides:
                    rounds[name].append(processes[name].run(case))
            yield case, {name: best(found[1:]) for name, found in rounds.items()}


def best(rounds: Sequence[MicroRound]) -> MicroRound:
    """Least time of each stage over the rounds, at the speed of the reference.

    What disturbs a round only adds to its times. A busy machine slows its calibration down, too.
    So results of different runs can be compared.
    """
    ratios = {
        name: min(each.stages[name] / each.calibration for each in rounds)
        for name in rounds[0].stages
    }
    stages = {name: ratio * REFERENCE for name, ratio in ratios.items()}
    return MicroRound(stages=stages, calibration=min(each.calibration for each in rounds))


def _serve(side: Side, model: Path, pipe: Connection) -> None:
    with pipe, _host_path(side, model) as path, suppress(EOFError):
        while True:
            pipe.send(path.run(pipe.recv()))
    os._exit(0)  # without the reports of extension modules about leaked objects


@contextmanager
def _host_path(side: Side, model: Path) -> Iterator["HostPath"]:
    os.environ.update(ENVIRONMENT)
    if side == "vllm":
        from bench.harness.host_path.vllm_side import vllm_config, vllm_params

        with vllm_config(model) as config:
            yield HostPath(config, vllm_params)
        return
    from bench.harness.host_path.our_side import our_config, our_params

    with our_config(model) as config:
        yield HostPath(config, our_params)


class HostPath:
    """EngineCore, the serialization of its outputs, and the output processor, in one thread."""

    def __init__(self, config: Any, params: Any) -> None:
        from vllm import envs
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        from bench.harness.host_path.null_executor import NullExecutor

        self._core = EngineCore(config, NullExecutor, log_stats=True)
        self._processor = OutputProcessor(None, log_stats=True)
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self._params = params
        self._chunk: int = envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
        self._seconds = dict.fromkeys((*STAGES, EXECUTE, ADD), 0.0)
        self._names = itertools.count()
        scheduler, executor = self._core.scheduler, self._core.model_executor
        for owner, method, stage in (
            (scheduler, "schedule", SCHEDULE),
            (scheduler, "update_from_output", UPDATE),
            (executor, "execute_model", EXECUTE),
            (executor, "sample_tokens", EXECUTE),
        ):
            setattr(owner, method, self._timed(stage, getattr(owner, method)))
        envs.enable_envs_cache()

    def run(self, case: MicroCase) -> MicroRound:
        gc.collect()
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        queues, num_tokens = self._submit(case), 0
        calibrations = [calibrate()]
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            num_tokens += self._step(queues)
            calibrations.append(calibrate())
        assert num_tokens == case.num_tokens, f"{num_tokens} tokens of {case.num_tokens}"
        seconds = self._seconds
        seconds[REST] -= seconds[SCHEDULE] + seconds[EXECUTE] + seconds[UPDATE]
        stages = {name: 1e6 * each / case.num_tokens for name, each in seconds.items()}
        stages[ADD] *= case.max_tokens  # per request
        return MicroRound(stages=stages, calibration=sum(calibrations) / len(calibrations))

    def _submit(self, case: MicroCase) -> dict[str, Any]:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestOutputCollector

        queues = {}
        for _ in range(case.num_requests):
            number = next(self._names)
            name = f"request-{number}"
            prompt = [5 + number % 64, 5 + number // 64 % 64, 5 + number // 4096 % 64]
            prompt += [12] * (case.prompt_tokens - len(prompt))
            params = self._params(case, name, prompt)
            request = EngineCoreRequest(
                request_id=name,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                external_req_id=name,
            )
            queues[name] = RequestOutputCollector(params.output_kind, name)
            self._processor.add_request(request, None, None, 0, queues[name])
            began = time.thread_time()
            self._core.add_request(*self._core.preprocess_add_request(request))
            self._seconds[ADD] += time.thread_time() - began
        return queues

    def _step(self, queues: Mapping[str, Any]) -> int:
        """One step of EngineCore; returns the number of tokens of requests that it finished."""
        outputs, executed = self._call(REST, self._core.step_fn)
        self._core.post_step(executed)
        return sum(self._deliver(each, queues) for each in (outputs or {}).values())

    def _deliver(self, outputs: Any, queues: Mapping[str, Any]) -> int:
        buffers = self._call(ENCODE, self._encoder.encode_into, outputs, bytearray())
        frames = [bytes(buffer) for buffer in buffers]  # as the socket copies them
        decoded = self._call(DECODE, self._decoder.decode, frames)
        self._call(PROCESS, self._process, decoded)
        return sum(_num_new_tokens(queue) for queue in queues.values())

    def _process(self, outputs: Any) -> None:
        """The loop of AsyncLLM over chunks of outputs."""
        from vllm.v1.metrics.stats import IterationStats

        stats = IterationStats() if outputs.outputs else None
        for start in range(0, len(outputs.outputs), self._chunk):
            self._processor.process_outputs(
                outputs.outputs[start : start + self._chunk],
                outputs.timestamp,
                stats,
                weight_version=outputs.weight_version,
            )
        self._processor.update_scheduler_stats(outputs.scheduler_stats)

    def _call(self, stage: str, function: Any, *args: Any) -> Any:
        began = time.thread_time()
        result = function(*args)
        self._seconds[stage] += time.thread_time() - began
        return result

    def _timed(self, stage: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[stage] += time.thread_time() - began

        return call


def _num_new_tokens(queue: Any) -> int:
    """Number of tokens that a request's output adds, or has in all if it is a cumulative one."""
    output = queue.get_nowait()
    if output is None or not (output.finished or queue.aggregate):
        return 0
    return len(output.outputs[0].token_ids)


@dataclass(slots=True)
class _Item:
    number: int
    values: list[int]

    def count(self) -> int:
        return len(self.values)


def calibrate() -> float:
    """Microseconds of an iteration of a fixed loop: objects, lists, calls and dictionaries."""
    items = {number: _Item(number, [number]) for number in range(CALIBRATION_ITEMS)}
    total, last = 0, CALIBRATION_ITEMS - 1
    began = time.thread_time()
    for step in range(CALIBRATION_STEPS):
        items[step & last] = _Item(step, [step])
        total += items[step * 7 & last].count()
    seconds = time.thread_time() - began
    assert total == CALIBRATION_STEPS
    return 1e6 * seconds / CALIBRATION_STEPS
