"""Hooks for sampling supports in the service, EngineCore and Model Runner V1's sampler.

With `logprobs_mode="processed_logprobs"` the sampler's logprobs are minus infinity for exactly the
token ids that a token could not be sampled from, whatever excluded them: top-k, top-p, min-p, a
grammar, allowed token ids, bad words, a bias of minus infinity or `min_tokens`. So one hook, where
vLLM gathers the logprobs of the sampled tokens, covers all constraints, with drafts and without.

vLLM's own `return_sampling_mask` is an option of the engine instead of the request. It refuses
greedy requests and requests without top-k, and is not implemented in the first model runner.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine.sampling import model_runner_v2_hooks
from engine.sampling.step_supports import (
    FEATURE,
    PendingRow,
    PendingSupport,
    Wanted,
    returns_output,
)

Method = Callable[..., Any]


@functools.cache
def install_in_service() -> None:
    """Make vLLM's frontend return the slices of a request as they are, not as lists of ints."""
    from vllm.v1.engine.output_processor import RequestState

    RequestState._new_completion_output = _with_chunks(RequestState._new_completion_output)


@functools.cache
def install_in_engine_core() -> None:
    """Make vLLM's scheduler pass on the supports that a step returns."""
    from vllm.v1.core.sched.scheduler import Scheduler

    upstream = Scheduler.__init__

    @functools.wraps(upstream)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        self.return_sampling_mask = True

    Scheduler.__init__ = init


@functools.cache
def install_in_worker() -> None:
    """Make vLLM's model runners return supports; on a GPU either of them may be used."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        install_in_first_runner(CPUModelRunner)
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    install_in_first_runner(GPUModelRunner)
    model_runner_v2_hooks.install(SecondRunner, Sampler)


def install_in_first_runner(runner: Any) -> None:
    runner.coppice_wanted = {}, {}
    runner._sample = _recording(runner._sample)
    runner.sample_tokens = _attaching(runner.sample_tokens)


def _with_chunks(upstream: Method) -> Method:
    @functools.wraps(upstream)
    def completion(self: Any, token_ids: Any, finish_reason: Any, stop_reason: Any) -> Any:
        from vllm.sampling_params import RequestOutputKind

        chunks: list[Any] = []
        if finish_reason is not None or self.output_kind == RequestOutputKind.DELTA:
            chunks, self.sampling_mask_chunks = self.sampling_mask_chunks, []
        output = upstream(self, token_ids, finish_reason, stop_reason)
        if chunks:
            output.sampling_mask = chunks
        return output

    return completion


def _recording(upstream: Method) -> Method:
    """vLLM's `_sample` of the first runner, which also records the supports of its samples."""

    @functools.wraps(upstream)
    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        wanted, raw = self.coppice_wanted
        if not wanted:
            return upstream(self, logits, spec_decode_metadata)
        with _recorded_logprobs(self.sampler) as recorded:
            output = upstream(self, logits, spec_decode_metadata)
        self.coppice_support = _pending(wanted, recorded, raw, spec_decode_metadata, output)
        return output

    return sample


@FEATURE.guarded_with_default(dict[int, Wanted]())
def _wanted_rows(runner: Any) -> dict[int, Wanted]:
    """Batch rows that return supports or requested logprobs, on the rank whose output is used."""
    if runner.execute_model_state is None or not returns_output():
        return {}
    found = (
        (row, Wanted.by(runner.requests[request_id].sampling_params))
        for row, request_id in enumerate(runner.input_batch.req_ids)
    )
    return {row: wanted for row, wanted in found if wanted}


@contextmanager
def _recorded_logprobs(sampler: Any) -> Iterator[list[torch.Tensor]]:
    """Record the logprobs [n, v] from which vLLM gathers those of the sampled tokens.

    A step gathers once. If the verification of drafts fails and is repeated, the last counts.
    """
    recorded: list[torch.Tensor] = []
    upstream = sampler.gather_logprobs

    def gather_logprobs(logprobs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        recorded.append(logprobs)
        return upstream(logprobs, *args, **kwargs)

    sampler.gather_logprobs = gather_logprobs
    try:
        yield recorded
    finally:
        del sampler.gather_logprobs


@FEATURE.guarded_with_default(dict[int, torch.Tensor]())
def _raw_logprobs(runner: Any, wanted: dict[int, Wanted]) -> dict[int, torch.Tensor]:
    """Raw logprobs [n, v] of the batch rows that return some.

    They are computed before vLLM applies grammars and changes the logits in place.
    """
    rows = [row for row, each in wanted.items() if each.logprobs.num_raw is not None]
    if not rows:
        return {}
    state = runner.execute_model_state
    ends = np.cumsum(_num_positions(len(runner.input_batch.req_ids), state.spec_decode_metadata))
    return {
        row: state.logits[0 if not row else ends[row - 1] : ends[row]].float().log_softmax(-1)
        for row in rows
    }


def _num_positions(num_rows: int, metadata: Any) -> list[int]:
    """Number of positions that are sampled at per batch row: one after every draft, and one."""
    if metadata is None:
        return [1] * num_rows
    return [1 + drafted for drafted in metadata.num_draft_tokens]


def _no_support(*_: Any) -> PendingSupport | None:
    return None


@FEATURE.guarded(_no_support)
def _pending(
    wanted: dict[int, Wanted],
    recorded: list[torch.Tensor],
    raw: dict[int, torch.Tensor],
    metadata: Any,
    output: Any,
) -> PendingSupport | None:
    """Supports of a step. Copies only the rows of requests that return supports, as booleans."""
    num_rows, longest = output.sampled_token_ids.shape
    starts = _starts(len(recorded[-1]), num_rows, longest, metadata)
    lengths = _num_positions(num_rows, metadata)

    def logprobs_of(rows: Sequence[int]) -> torch.Tensor:
        indices = [n for row in rows for n in range(starts[row], starts[row] + lengths[row])]
        return recorded[-1][indices] if len(indices) < len(recorded[-1]) else recorded[-1]

    kept, values = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    if rows := [row for row, wants in wanted.items() if wants.support]:
        kept = _by_row(rows, lengths, logprobs_of(rows) > -torch.inf)
    for options in {wants.logprobs for wants in wanted.values() if wants.logprobs.width}:
        rows = [row for row, wants in wanted.items() if wants.logprobs == options]
        # Rejected drafts are -1.
        tokens = [output.sampled_token_ids[row, : lengths[row]].clamp(min=0) for row in rows]
        has_raw = options.num_raw is not None
        logprobs_nv = torch.cat([raw[row] for row in rows]) if has_raw else logprobs_of(rows)
        gathered_nw = options.gather(logprobs_nv, torch.cat(tokens), _gather)
        values |= _by_row(rows, lengths, gathered_nw)
    return PendingSupport(
        {row: PendingRow(kept_nv=kept.get(row), values_nw=values.get(row)) for row in wanted}
    )


def _gather(logprobs_nv: torch.Tensor, ids_nk: torch.Tensor) -> torch.Tensor:
    return logprobs_nv.gather(-1, ids_nk)


def _by_row(
    rows: Sequence[int], lengths: Sequence[int], values: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Copies of values at consecutive positions to the host, by batch row."""
    parts = torch.split(values.to("cpu", non_blocking=True), [lengths[row] for row in rows])
    return dict(zip(rows, parts, strict=True))


def _starts(num_positions: int, num_rows: int, longest: int, metadata: Any) -> list[int]:
    """Start of each batch row in the gathered logprobs.

    vLLM's rejection sampler pads all rows to the longest draft. `DraftVerifier` does not.
    """
    if num_positions == num_rows * longest:
        return [row * longest for row in range(num_rows)]
    lengths = _num_positions(num_rows, metadata)
    assert sum(lengths) == num_positions, "one position per draft token and one per request"
    return [0, *np.cumsum(lengths)[:-1].tolist()]


def _attaching(upstream: Method) -> Method:
    """vLLM's `sample_tokens` of the first runner, with the supports in its output."""

    @functools.wraps(upstream)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        self.coppice_support, wanted = None, _wanted_rows(self)
        self.coppice_wanted = wanted, _raw_logprobs(self, wanted)
        output = upstream(self, grammar_output)
        pending, self.coppice_support = self.coppice_support, None
        self.coppice_wanted = {}, {}
        return output if pending is None else _attach(output, pending)

    return sample_tokens


def _attach(output: Any, pending: PendingSupport) -> Any:
    from vllm.v1.outputs import AsyncModelRunnerOutput

    if isinstance(output, AsyncModelRunnerOutput):
        return _asynchronous(output, pending)
    output.sampling_masks = _encode(pending, output.sampled_token_ids)
    return output


@FEATURE.guarded_with_default(None)
def _encode(pending: PendingSupport, sampled: Any) -> Any:
    return pending.encode(sampled)


def _asynchronous(output: Any, pending: PendingSupport) -> Any:
    """Wrap the output of a step that is still being copied to the host."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    copied = torch.Event()
    copied.record()

    class AsyncSupport(AsyncModelRunnerOutput):  # type: ignore[misc]
        def get_output(self) -> Any:
            done = output.get_output()
            copied.synchronize()
            done.sampling_masks = _encode(pending, done.sampled_token_ids)
            return done

    return AsyncSupport()
