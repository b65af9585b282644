"""Hooks in vLLM that return the supports of sampled tokens.

With `logprobs_mode="processed_logprobs"` the sampler's logprobs are minus infinity for exactly the
token ids that a token could not be sampled from, whatever excluded them: top-k, top-p, min-p, a
grammar, allowed token ids, bad words, a bias of minus infinity or `min_tokens`. So one hook, where
vLLM gathers the logprobs of the sampled tokens, covers all constraints, with drafts and without.

vLLM's own `return_sampling_mask` is an option of the engine instead of the request. It refuses
greedy requests and requests without top-k, and is not implemented in the first model runner.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine.runtime.feature_guard import feature
from engine.sampling_support.step import PendingSupport, SupportTensors, wants_support

FEATURE = feature("support replay")
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
    install_in_second_runner(SecondRunner, Sampler)


def install_in_first_runner(runner: Any) -> None:
    runner._sample = _recording(runner._sample)
    runner.sample_tokens = _attaching(runner.sample_tokens)


def install_in_second_runner(runner: Any, sampler: Any) -> None:
    sampler.add_request = _registering(sampler.add_request)
    runner.sample = _with_masks(runner.sample)


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
        self.coppice_support = None
        wanted = _wanted_rows(self)
        if not wanted:
            return upstream(self, logits, spec_decode_metadata)
        with _recorded_logprobs(self.sampler) as recorded:
            output = upstream(self, logits, spec_decode_metadata)
        self.coppice_support = _pending(wanted, recorded, spec_decode_metadata, output)
        return output

    return sample


@FEATURE.guarded_with_default(list[int]())
def _wanted_rows(runner: Any) -> list[int]:
    """Batch rows that return supports, on the rank whose output is used."""
    if not _returns_output():
        return []
    return [
        row
        for row, request_id in enumerate(runner.input_batch.req_ids)
        if wants_support(runner.requests[request_id].sampling_params)
    ]


def _returns_output() -> bool:
    from vllm.distributed import parallel_state

    return (
        not parallel_state.model_parallel_is_initialized()
        or parallel_state.get_tensor_model_parallel_rank() == 0
    )


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


def _no_support(
    wanted: list[int], recorded: list[torch.Tensor], metadata: Any, output: Any
) -> PendingSupport | None:
    return None


@FEATURE.guarded(_no_support)
def _pending(
    wanted: list[int], recorded: list[torch.Tensor], metadata: Any, output: Any
) -> PendingSupport | None:
    """Supports of a step. Copies only the rows of requests that return supports, as booleans."""
    logprobs_nv = recorded[-1]
    num_rows, longest = output.sampled_token_ids.shape
    starts, lengths = _layout(len(logprobs_nv), num_rows, longest, metadata)
    indices = [n for row in wanted for n in range(starts[row], starts[row] + lengths[row])]
    ends = np.cumsum([lengths[row] for row in wanted]).tolist()
    kept_nv = logprobs_nv[indices] if len(indices) < len(logprobs_nv) else logprobs_nv
    return PendingSupport(
        kept_nv=(kept_nv > -torch.inf).to("cpu", non_blocking=True),
        starts=dict(zip(wanted, [0, *ends], strict=False)),
    )


def _layout(
    num_positions: int, num_rows: int, longest: int, metadata: Any
) -> tuple[list[int], list[int]]:
    """Start and number of positions of each batch row in the gathered logprobs.

    vLLM's rejection sampler pads all rows to the longest draft. `DraftVerifier` does not.
    """
    if num_positions == num_rows * longest:
        return [row * longest for row in range(num_rows)], [longest] * num_rows
    lengths = [1 + drafted for drafted in metadata.num_draft_tokens]
    assert sum(lengths) == num_positions, "one position per draft token and one per request"
    return [0, *np.cumsum(lengths).tolist()], lengths


def _attaching(upstream: Method) -> Method:
    """vLLM's `sample_tokens` of the first runner, with the supports in its output."""

    @functools.wraps(upstream)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        self.coppice_support = None
        output = upstream(self, grammar_output)
        pending, self.coppice_support = self.coppice_support, None
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


def _registering(upstream: Method) -> Method:
    """The `add_request` of the second runner's sampler, which also records who gets supports."""

    @functools.wraps(upstream)
    def add_request(self: Any, req_idx: int, sampling_params: Any) -> None:
        upstream(self, req_idx, sampling_params)
        wanted = self.__dict__.get("coppice_wants_support")
        if wanted is None:
            wanted = self.coppice_wants_support = np.zeros(len(self.needs_logits_processing), bool)
        wanted[req_idx] = wants_support(sampling_params)

    return add_request


def _with_masks(upstream: Method) -> Method:
    """vLLM's `sample` of the second runner, with masks in the steps that have a request for them.

    A step with such a request returns processed logprobs, so vLLM uses no fused sampler in it.
    """

    @functools.wraps(upstream)
    def sample(self: Any, hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = _wanted_mask(self.sampler, input_batch)
        if wanted is not None:
            self.sampler.return_sampling_mask = True
        try:
            results = upstream(self, hidden_states, input_batch, *args, **kwargs)
        finally:
            if wanted is not None:
                self.sampler.return_sampling_mask = False
        output = results[0]
        if wanted is not None and output.sampling_mask_tensors is not None:
            output.sampling_mask_tensors = SupportTensors(
                tensors=output.sampling_mask_tensors, wanted=wanted
            )
        return results

    return sample


@FEATURE.guarded_with_default(None)
def _wanted_mask(sampler: Any, input_batch: Any) -> Any:
    known = sampler.__dict__.get("coppice_wants_support")
    if known is None or not _returns_output():
        return None
    wanted = known[input_batch.idx_mapping_np]
    return wanted if wanted.any() else None
