"""Hooks in Model Runner V2's sampler: sampling supports and extra logprobs.

vLLM's kernel makes the masks of a step. The requested logprobs are gathered from the logits of
which vLLM computes the logprobs of the sampled tokens.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.step_supports import FEATURE, StepSupport, Wanted, returns_output
from engine.sampling.support_encoding import ALL, IDS, encode_id_rows, encode_mask

Method = Callable[..., Any]


@dataclass
class StepLogits:
    """Logits of one step: raw ones [n, v], processed ones in chunks, and the sampled tokens."""

    raw_nv: torch.Tensor | None = None
    processed: list[torch.Tensor] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)


_recording: list[StepLogits] = []
"""The step that is being sampled, if one of its requests returns requested logprobs."""


def install(runner: Any, sampler: Any) -> None:
    from vllm.v1.worker.gpu.sample import sampler as samplers
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    sampler.add_request = _registering(sampler.add_request)
    runner.sample = _with_supports(runner.sample)
    for module in (samplers, rejection_sampler):
        module.compute_topk_scores = _recording_scores(module.compute_topk_scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """Requested logprobs [n, width] of batch rows, with the number of positions of each row."""

    lengths: Mapping[int, int]
    values_nw: torch.Tensor

    def by_row(self) -> dict[int, NDArray[Any]]:
        parts = torch.split(self.values_nw, list(self.lengths.values()))
        return {row: part.numpy() for row, part in zip(self.lengths, parts, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportTensors:
    """Supports of a step of vLLM's second model runner, in the place of `SamplingMaskTensors`.

    vLLM's kernel writes for every row a bitmap and the first token ids of the set. Only `wanted`
    batch rows are encoded. `values` has their requested logprobs.
    """

    tensors: Any
    wanted: Mapping[int, Wanted]
    values: Sequence[StepValues]

    def to_cpu_nonblocking(self) -> "SupportTensors":
        tensors = None if self.tensors is None else self.tensors.to_cpu_nonblocking()
        values = [
            replace(each, values_nw=each.values_nw.to("cpu", non_blocking=True))
            for each in self.values
        ]
        return replace(self, tensors=tensors, values=values)

    def tolists(self, num_sampled_tokens: NDArray[Any]) -> StepSupport:
        """Encode the supports; called in the thread that waits for the step's results."""
        per_row = 1 if self.tensors is None else self.tensors.rows_per_request
        slots = {
            row: range(row * per_row, row * per_row + num_sampled_tokens[row])
            for row in self.wanted
        }
        of_supports = [slot for row in slots if self.wanted[row].support for slot in slots[row]]
        supports = _encode(self.tensors, of_supports) if of_supports else {}

        values = {row: of_row for each in self.values for row, of_row in each.by_row().items()}

        def encoded(row: int, n: int, slot: int) -> bytes:
            prefix = values[row][n].tobytes() if row in values else b""
            return prefix + supports.get(slot, b"")

        return StepSupport(
            {row: [encoded(row, *each) for each in enumerate(slots[row])] for row in slots}
        )


def _encode(tensors: Any, slots: Sequence[int]) -> dict[int, bytes]:
    """Encoded supports by slot of vLLM's tensors, as `encode_mask` encodes them.

    Sets that its kernel has listed are encoded together. A bitmap takes the time of its vocabulary.
    """
    ids, bitmaps, counts = (each.cpu().numpy() for each in tensors[:3])
    num_bytes = bitmaps.shape[1]
    # Each id takes at least one byte.
    listed = [slot for slot in slots if counts[slot] <= min(ids.shape[1], num_bytes)]
    flat = np.concatenate([ids[:0, 0], *(ids[slot, : counts[slot]] for slot in listed)])
    rows = encode_id_rows(flat, np.cumsum(counts[listed]))
    short = {
        slot: bytes([IDS]) + row
        for slot, row in zip(listed, rows, strict=True)
        if len(row) <= num_bytes
    }

    def encoded(slot: int) -> bytes:
        if counts[slot] == tensors.vocab_size:
            return ALL
        if slot in short:
            return short[slot]
        bits = np.unpackbits(bitmaps[slot], count=tensors.vocab_size, bitorder="little")
        return encode_mask(bits.view(np.bool_))

    return {slot: encoded(slot) for slot in slots}


def _registering(upstream: Method) -> Method:
    """The `add_request` of the sampler, which also records what a request returns."""

    @functools.wraps(upstream)
    def add_request(self: Any, req_idx: int, sampling_params: Any) -> None:
        upstream(self, req_idx, sampling_params)
        known = self.__dict__.setdefault("coppice_wanted", {})
        known.pop(req_idx, None)
        if wanted := Wanted.by(sampling_params):
            known[req_idx] = wanted

    return add_request


def _with_supports(upstream: Method) -> Method:
    """vLLM's `sample`, with masks and requested logprobs in the steps that have a request for them.

    A step with such a request returns processed logprobs, so vLLM uses no fused sampler in it.
    """

    @functools.wraps(upstream)
    def sample(self: Any, hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = _wanted_rows(self.sampler, input_batch)
        if not wanted:
            return upstream(self, hidden_states, input_batch, *args, **kwargs)
        self.sampler.return_sampling_mask = any(each.support for each in wanted.values())
        try:
            with _recorded(self, wanted) as step:
                results = upstream(self, hidden_states, input_batch, *args, **kwargs)
        finally:
            self.sampler.return_sampling_mask = False
        output = results[0]
        output.sampling_mask_tensors = SupportTensors(
            tensors=output.sampling_mask_tensors,
            wanted=wanted,
            values=_values(wanted, step, input_batch.cu_num_logits_np),
        )
        return results

    return sample


@FEATURE.guarded_with_default(dict[int, Wanted]())
def _wanted_rows(sampler: Any, input_batch: Any) -> dict[int, Wanted]:
    known: dict[int, Wanted] = sampler.__dict__.get("coppice_wanted") or {}
    if not known or not returns_output():
        return {}
    slots = input_batch.idx_mapping_np.tolist()
    return {row: known[slot] for row, slot in enumerate(slots) if slot in known}


@contextmanager
def _recorded(runner: Any, wanted: Mapping[int, Wanted]) -> Iterator[StepLogits]:
    """Record the logits of a step, if one of its requests returns requested logprobs."""
    step = StepLogits()
    with ExitStack() as stack:
        if any(each.logprobs.width for each in wanted.values()):
            _recording.append(step)
            stack.callback(_recording.pop)
        if any(each.logprobs.num_raw is not None for each in wanted.values()):
            stack.enter_context(_recorded_raw(runner.model, step))
        yield step


@contextmanager
def _recorded_raw(model: Any, step: StepLogits) -> Iterator[None]:
    """Record a copy of the model's logits: grammars and samplers change them in place."""
    compute = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        step.raw_nv = None if logits is None else logits.clone()
        return logits

    model.compute_logits = compute_logits
    try:
        yield
    finally:
        del model.compute_logits


def _recording_scores(upstream: Method) -> Method:
    """vLLM's `compute_topk_scores`, which is called with the logits of all sampled positions."""

    @functools.wraps(upstream)
    def scores(
        logits: torch.Tensor, num_logprobs: int, sampled: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if _recording:
            _recording[-1].processed.append(logits)
            _recording[-1].tokens.append(sampled)
        return upstream(logits, num_logprobs, sampled, *args, **kwargs)

    return scores


@FEATURE.guarded_with_default(list[StepValues]())
def _values(wanted: Mapping[int, Wanted], step: StepLogits, ends: NDArray[Any]) -> list[StepValues]:
    """Requested logprobs of the batch rows that request the same, in one pass over the logits."""
    from vllm.v1.worker.gpu.sample import logprob

    values = list[StepValues]()
    for options in {each.logprobs for each in wanted.values() if each.logprobs.width}:
        rows = [row for row, each in wanted.items() if each.logprobs == options]
        logits_nv = _joined(step.processed) if options.num_raw is None else step.raw_nv
        tokens_n = _joined(step.tokens)
        assert logits_nv is not None, "the logits of the model were recorded"
        assert len(tokens_n) == ends[-1], "one position per draft token and one per request"
        at = [n for row in rows for n in range(ends[row], ends[row + 1])]
        if len(at) < len(tokens_n):
            logits_nv, tokens_n = logits_nv[at], tokens_n[at]
        gathered = options.gather(logits_nv, tokens_n, logprob.compute_token_logprobs)
        lengths = {row: int(ends[row + 1] - ends[row]) for row in rows}
        values.append(StepValues(lengths=lengths, values_nw=gathered))
    return values


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
