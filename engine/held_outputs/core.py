"""Outputs that EngineCore holds back, to send one output for many tokens of a request.

vLLM sends an output per request and step. Most of EngineCore's time per token, and nearly all of
the service's, went into them: a logprob is sent as three arrays of one element. Here the tokens of
a request wait in EngineCore, their logprobs in arrays of whole steps (`StepArrays`), until

- the request ends, or has an output that carries anything else than tokens,
- FINAL_SECONDS have passed, or for streams STREAM_SECONDS or less,
- the service asks for them (`hooks.coppice_flush_outputs`), before it aborts samples,
- generation is paused: weights versions change only then, and vLLM labels the tokens of an output
  with the version of the time at which it is sent.

Then they leave as one output of vLLM, which its output processor takes as it takes the tokens of a
step with speculation. The logprobs of all requests that are sent together are in one output before
them (`hold_option`). The first output of a request is never held.

A step that sends no output sends no statistics either, if these can wait for a later step.

https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/core/sched/scheduler.py, the method
`update_from_output`
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

from engine.held_outputs.hold_option import HOLD_ARG, LOGPROBS_ID, STEPS_ID
from engine.held_outputs.step_arrays import SlicePositions, StepArrays, sliced
from engine.sampling.step_supports import joined_rows

FINAL_SECONDS: Final = 0.2
"""Longest time for which outputs are held: the progress of a sample is at most as old."""
STREAM_SECONDS: Final = 0.05
STREAM_SECONDS_PER_ROW: Final = 0.0004
"""Several times as long as the service takes to process and write an output of a stream."""
STATS_SECONDS: Final = 0.05
MAX_BYTES: Final = 16 << 20

Outputs = dict[int, EngineCoreOutputs]


@dataclass(slots=True)
class HeldRow:
    """Tokens of a request that wait in EngineCore. `width` is its number of logprobs per token."""

    request_id: str
    client_index: int
    width: int
    is_stream: bool
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)
    experts: list[Any] = field(default_factory=list)

    def take(self) -> EngineCoreOutput:
        """The output of all its tokens, without logprobs. They are then no longer held."""
        output = EngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=self.token_ids,
            new_sampling_mask=joined_rows(self.supports) if self.supports else None,
            routed_experts=np.concatenate(self.experts) if self.experts else None,
        )
        self.token_ids, self.positions, self.supports, self.experts = [], [], [], []
        return output


def _row(request: Any) -> HeldRow | None:
    """Row of a new request; None if its outputs are not held."""
    params = request.sampling_params
    hold = (params and params.extra_args or {}).get(HOLD_ARG)
    if hold is None:
        return None
    return HeldRow(
        request_id=request.request_id,
        client_index=request.client_index,
        width=1 + (params.num_logprobs or 0),
        is_stream=hold == "stream",
    )


def _has_tokens_only(output: EngineCoreOutput) -> bool:
    return (
        output.finish_reason is None
        and output.kv_transfer_params is None
        and output.prefill_stats is None
        and output.events is None
        and output.new_prompt_logprobs_tensors is None
        and output.prompt_token_id_logprobs is None
        and output.pooling_output is None
        and output.ec_transfer_params is None
    )


@dataclass(slots=True)
class _Step:
    """Logprobs of a step, which are appended to the arrays with its first held row."""

    logprobs: LogprobsLists | None
    arrays: StepArrays
    first: int | None = None

    def hold(self, output: EngineCoreOutput, row: HeldRow) -> None:
        row.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            first, number = output.new_logprobs
            if self.first is None:
                self.first = self.arrays.append(self.logprobs)
            first += self.first
            row.positions.extend(range(first, first + number))
        if output.new_sampling_mask is not None:
            row.supports += output.new_sampling_mask
        if output.routed_experts is not None:
            row.experts.append(output.routed_experts)

    def merged(self, output: EngineCoreOutput, row: HeldRow) -> EngineCoreOutput:
        """An output of a request that is sent at once, after the tokens of its row."""
        self.hold(output, row)
        logprobs = self.arrays.take(row.positions, row.width) if row.positions else None
        held = row.take()
        output.new_token_ids, output.new_logprobs = held.new_token_ids, logprobs
        output.new_sampling_mask = held.new_sampling_mask
        output.routed_experts = held.routed_experts
        return output

    def completed(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """An output that is sent at once, with its own logprobs and supports."""
        if output.new_logprobs is not None:
            output.new_logprobs = sliced(self.logprobs, *output.new_logprobs)
        if output.new_sampling_mask is not None:
            output.new_sampling_mask = joined_rows(output.new_sampling_mask)
        return output


class HeldOutputs:
    """Outputs that the EngineCore of a scheduler holds."""

    def __init__(self, scheduler: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._rows: dict[str, HeldRow | None] = {}
        self._arrays = StepArrays()
        self._logprobs: LogprobsLists | None = None
        self._version = ""
        self._step_tokens = list[int]()
        self._last_flush = self._last_stream_flush = self._last_stats = clock()

    def before_update(self, model_runner_output: Any) -> None:
        """Keep the scheduler from slicing the logprobs of a step."""
        self._logprobs = model_runner_output.logprobs
        if self._logprobs is not None:
            model_runner_output.logprobs = SlicePositions(*self._logprobs)

    def after_step(self, outputs: Outputs, version: str) -> None:
        """Hold what may be held of the outputs of a step, and add what is to be sent now.

        `version` is the one that vLLM labels the tokens of the step with.
        """
        if version != self._version:
            assert not any(self._holding()), "tokens were held while the weights version changed"
            self._version = version
        step, self._logprobs = _Step(self._logprobs, self._arrays), None
        self._count_step(outputs)
        for each in outputs.values():
            each.outputs = list(self._passed(each.outputs, step))
        now = self._clock()
        taken = self.flush() if self._must_flush(now) else self._take_streams(now)
        for client_index, each in taken.items():
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs += each.outputs
        self._tell_steps(outputs)

    def _count_step(self, outputs: Outputs) -> None:
        found = (output for each in outputs.values() for output in each.outputs)
        if num_tokens := sum(len(output.new_token_ids) for output in found):
            self._step_tokens.append(num_tokens)

    def _tell_steps(self, outputs: Outputs) -> None:
        """Add the tokens per step since the last message, for vLLM's metric of them."""
        sent = next((each.outputs for each in outputs.values() if each.outputs), None)
        if sent is not None and self._step_tokens:
            sent.append(EngineCoreOutput(STEPS_ID, self._step_tokens))
            self._step_tokens = []

    def _passed(
        self, outputs: Iterable[EngineCoreOutput], step: _Step
    ) -> Iterator[EngineCoreOutput]:
        for output in outputs:
            row = self._row_of(output.request_id)
            if row is not None and _has_tokens_only(output):
                step.hold(output, row)
                continue
            if row is None or not row.token_ids:
                yield step.completed(output)
            elif output.kv_transfer_params is None:
                yield step.merged(output, row)
            else:  # it may tell the KV versions of the tokens that follow
                yield from self._taken([row])
                yield step.completed(output)

    def _row_of(self, request_id: str) -> HeldRow | None:
        try:
            return self._rows[request_id]
        except KeyError:
            request = self._scheduler.requests.get(request_id)
            if request is None:  # it ends with its first output
                return None
            return self._rows.setdefault(request_id, _row(request))

    def _holding(self) -> Iterator[HeldRow]:
        return (row for row in self._rows.values() if row is not None and row.token_ids)

    def _must_flush(self, now: float) -> bool:
        return bool(
            now - self._last_flush >= FINAL_SECONDS
            or self._arrays.num_bytes > MAX_BYTES
            or self._scheduler.pause_state != PauseState.UNPAUSED
        )

    def _take_streams(self, now: float) -> Outputs:
        streams = [row for row in self._holding() if row.is_stream]
        seconds = min(STREAM_SECONDS, STREAM_SECONDS_PER_ROW * len(streams))
        if not streams or now - self._last_stream_flush < seconds:
            return {}
        self._last_stream_flush = now
        return self._by_client(streams)

    def flush(self) -> Outputs:
        """All held tokens, those of requests that have been aborted since, too."""
        self._last_flush = self._last_stream_flush = self._clock()
        found = self._by_client(self._holding())
        self._arrays.clear()
        requests = self._scheduler.requests
        self._rows = {name: row for name, row in self._rows.items() if name in requests}
        return found

    def flush_between_steps(self) -> Outputs:
        found = self.flush()
        self._tell_steps(found)
        return found

    def _by_client(self, rows: Iterable[HeldRow]) -> Outputs:
        by_client: dict[int, list[HeldRow]] = {}
        for row in rows:
            by_client.setdefault(row.client_index, []).append(row)
        return {
            client_index: EngineCoreOutputs(outputs=list(self._taken(of_client)))
            for client_index, of_client in by_client.items()
        }

    def _taken(self, rows: Iterable[HeldRow]) -> Iterator[EngineCoreOutput]:
        """Outputs of rows, after one with the logprobs of all rows of the same width."""
        by_width: dict[int, list[HeldRow]] = {}
        for row in rows:
            by_width.setdefault(row.width if row.positions else 0, []).append(row)
        for width in sorted(by_width):
            if width:
                positions = list(chain.from_iterable(row.positions for row in by_width[width]))
                logprobs = self._arrays.take(positions, width)
                yield EngineCoreOutput(LOGPROBS_ID, [], new_logprobs=logprobs)
            for row in by_width[width]:
                yield row.take()

    def wants_stats(self) -> bool:
        """True if the statistics of a step are to be sent, or the engine has become idle."""
        now = self._clock()
        if now - self._last_stats < STATS_SECONDS and self._scheduler.has_unfinished_requests():
            return False
        self._last_stats = now
        return True
