"""Held outputs as they arrive in the service's process."""

import asyncio
import functools
import uuid
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.outputs import LogprobsLists

from engine.held_outputs.hold_option import FLUSH_ID, LOGPROBS_ID, STEPS_ID
from engine.launch.processes import VllmProcesses
from engine.runtime.await_engine import await_engine

_ATTRIBUTE = "coppice_arrivals"


Stream = Callable[[Any, Any, str | None], None]
"""Receiver of each output of a running request: the state of the request in vLLM's output
processor, the output, and the weights version of its tokens."""
_STREAM = "coppice_stream"
_LATENCIES = "coppice_latencies"
_STEP_TOKENS = "coppice_step_tokens"


@dataclass(slots=True)
class _Flush:
    """A flush that has not arrived from all engines."""

    num_engines: int
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def on_arrival(self) -> None:
        self.num_engines -= 1
        if not self.num_engines:
            self.arrived.set()


@dataclass(slots=True)
class _Arrivals:
    """Logprobs and flushes that have arrived in part at an output processor."""

    flushes: dict[str, _Flush] = field(default_factory=dict)
    logprobs: LogprobsLists | None = None
    num_given: int = 0

    def give_logprobs(self, output: Any) -> None:
        """Give an output its part of the logprobs that were sent before it."""
        if output.request_id == LOGPROBS_ID:
            self.logprobs, self.num_given = output.new_logprobs, 0
        elif self.logprobs is not None:
            number = len(output.new_token_ids)
            output.new_logprobs = self.logprobs.slice_request(self.num_given, number)
            self.num_given += number
            if self.num_given == len(self.logprobs.sampled_token_ranks):
                self.logprobs = None

    def end_flush(self, request_id: str) -> None:
        if (pending := self.flushes.get(request_id)) is not None:
            pending.on_arrival()


def attach(llm: AsyncLLM, request_id: str, stream: Stream) -> None:
    """Have a receiver called with each output of a running request, but not with its last one."""
    state = llm.output_processor.request_states.get(request_id)
    if state is not None:
        state.__dict__[_STREAM] = stream


async def flush(processes: VllmProcesses, num_engines: int) -> None:
    """Have all engines send the tokens that they hold, and wait until they have been processed."""
    llm, flush_id = processes.llm, uuid.uuid4().hex
    arrivals: _Arrivals = llm.output_processor.__dict__.setdefault(_ATTRIBUTE, _Arrivals())
    flushes = arrivals.flushes
    pending = flushes[FLUSH_ID + flush_id] = _Flush(num_engines)
    try:
        await processes.call_cores("coppice_flush_outputs", flush_id)
        await await_engine(llm, pending.arrived.wait())
    finally:
        del flushes[FLUSH_ID + flush_id]


@functools.cache
def install() -> None:
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    PrometheusStatLogger.record = _observing(PrometheusStatLogger.record)
    OutputProcessor.process_outputs = _with_held(OutputProcessor.process_outputs)


def _with_held(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def process_outputs(
        self: Any,
        engine_core_outputs: list[Any],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        weight_version: str | None = None,
    ) -> Any:
        arrivals: _Arrivals = self.__dict__.setdefault(_ATTRIBUTE, _Arrivals())
        for output in engine_core_outputs:
            arrivals.give_logprobs(output)
            if iteration_stats is not None and output.request_id == STEPS_ID:
                iteration_stats.__dict__[_STEP_TOKENS] = output.new_token_ids
            elif iteration_stats is not None and len(output.new_token_ids) > 1:
                state = self.request_states.get(output.request_id)
                _count_latencies(state, output, engine_core_timestamp, iteration_stats)
        found = upstream(
            self, engine_core_outputs, engine_core_timestamp, iteration_stats, weight_version
        )
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                arrivals.end_flush(output.request_id)
            elif (stream := state.__dict__.get(_STREAM)) is not None:
                stream(state, output, weight_version)
        return found

    return process_outputs


def _count_latencies(state: Any, output: Any, timestamp: Any, iteration_stats: Any) -> None:
    """Count the latency of all but the last of several tokens, which vLLM counts as one.

    It is the mean of their latencies.
    """
    if state is None or state.is_prefilling:
        return
    number = len(output.new_token_ids)
    mean = (timestamp - state.stats.last_token_ts) / number
    iteration_stats.__dict__.setdefault(_LATENCIES, []).append((mean, number - 1))
    state.stats.last_token_ts = timestamp - mean


def _observing(upstream: Any) -> Any:
    """`PrometheusStatLogger.record`, which observes held tokens as if each step had sent its own.

    vLLM takes a message for a step.
    """

    @functools.wraps(upstream)
    def record(
        self: Any,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        upstream(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        if iteration_stats is not None:
            histogram = self.histogram_inter_token_latency[engine_idx]
            for seconds, number in iteration_stats.__dict__.get(_LATENCIES, ()):
                _observe(histogram, seconds, number)
            if (steps := iteration_stats.__dict__.get(_STEP_TOKENS)) is not None:
                _observe_steps(self.histogram_iteration_tokens[engine_idx], iteration_stats, steps)

    return record


def _observe_steps(histogram: Any, iteration_stats: Any, steps: list[int]) -> None:
    """Observe the tokens of each step, in place of those of their message."""
    num_prompt_tokens: int = iteration_stats.prompt_token_stats.computed
    _observe(histogram, num_prompt_tokens + iteration_stats.num_generation_tokens, -1)
    for num_tokens in steps[:-1]:
        _observe(histogram, num_tokens, 1)
    _observe(histogram, num_prompt_tokens + steps[-1], 1)


def _observe(histogram: Any, value: float, number: int) -> None:
    """Observe a value several times: `Histogram.observe` without its call per observation."""
    histogram._sum.inc(value * number)
    histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(number)
