"""Supports from vLLM's second model runner, with its own samplers and without a GPU.

Replaced are the kernels in Triton and the buffers that the GPU reads.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from coppice.wire.columns.support import decode_ids
from engine.sampling import model_runner_v2_hooks
from engine.sampling.requested_logprobs import LogprobValues, RequestedLogprobs
from engine.sampling.step_supports import SUPPORT_ARG, StepSupport
from engine.sampling.support_encoding import encode_mask

VOCAB, MAX_REQS = 40, 8
NO_LOGPROBS = RequestedLogprobs()


class HostTensor:
    """vLLM's `UvaBackedTensor` with one memory for both sides."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.gpu = torch.zeros(size, dtype=dtype)
        self.np = self.gpu.numpy()

    def copy_to_uva(self) -> None:
        pass


def compact(
    logits: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_sampled_tokens: torch.Tensor,
    max_num_kept: int,
    rows_per_request: int = 1,
) -> Any:
    """vLLM's kernel `_compact_sampling_mask_kernel`; unused slots have arbitrary content."""
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    num_rows, vocab = len(num_sampled_tokens) * rows_per_request, logits.shape[1]
    packed = np.full((num_rows, (vocab + 7) // 8), 0xAA, np.uint8)
    counts = np.zeros(num_rows, np.int32)
    ids = torch.full((num_rows, min(max_num_kept, vocab)), -7, dtype=torch.int32)
    for row, sampled in enumerate(num_sampled_tokens.tolist()):
        for slot in range(sampled):
            kept = torch.isfinite(logits[int(cu_num_logits[row]) + slot]).numpy()
            packed[row * rows_per_request + slot] = np.packbits(kept, bitorder="little")
            counts[row * rows_per_request + slot] = kept.sum()
            first = torch.from_numpy(np.flatnonzero(kept)[: ids.shape[1]])
            ids[row * rows_per_request + slot, : len(first)] = first
    return SamplingMaskTensors(
        ids, torch.from_numpy(packed), torch.from_numpy(counts), vocab, rows_per_request
    )


def draw(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return logits.argmax(-1)


def accept_all(
    logits: torch.Tensor,
    draft_logits: Any,
    drafted: torch.Tensor,
    cu: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled tokens and their number, if every draft is accepted but that of the last row."""
    num_sampled = torch.diff(cu)
    num_sampled[-1] = 1
    sampled = torch.zeros(len(num_sampled), int(num_sampled.max()), dtype=torch.int64)
    return sampled, num_sampled


def score_all(
    self: Any,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    logits: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *_: Any,
) -> Any:
    """vLLM's method without its kernel, which flattens the sampled tokens."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    rows = zip(sampled, torch.diff(cu_num_logits).tolist(), strict=True)
    flat = torch.cat([row[:length] for row, length in rows])
    return rejection_sampler.compute_topk_scores(logits, 0, flat)


def logprobs_at(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(-1, token_ids)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample import logprob, states
    from vllm.v1.worker.gpu.sample import sampler as samplers
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler as rejection

    monkeypatch.setattr(states, "UvaBackedTensor", HostTensor)
    monkeypatch.setattr(samplers, "gumbel_sample", draw)
    monkeypatch.setattr(samplers, "compute_topk_scores", lambda *_, **__: None)
    monkeypatch.setattr(rejection, "compute_topk_scores", lambda *_, **__: None)
    monkeypatch.setattr(rejection, "_flatten_sampled_kernel", {})
    monkeypatch.setattr(rejection, "rejection_sample", accept_all)
    monkeypatch.setattr(rejection.RejectionSampler, "_get_logprobs_tensors", score_all)
    monkeypatch.setattr(logprob, "compute_token_logprobs", logprobs_at)
    for module in (samplers, rejection):
        monkeypatch.setattr(module, "get_num_sampled_and_rejected", lambda n, *_: (n, n * 0))
    monkeypatch.setattr(
        rejection,
        "gather_draft_sampled",
        lambda ids, pos, at, *_: (ids[at].clone(), pos[at]),
    )
    monkeypatch.setattr(SamplingMaskTensors, "from_logits", compact)

    class Sampler(samplers.Sampler):  # type: ignore[misc]
        pass

    class Runner(GPUModelRunner):  # type: ignore[misc]
        pass

    model_runner_v2_hooks.install(Runner, Sampler)
    return connected(Runner, Sampler, rejection.RejectionSampler, states.SamplingStates)


def connected(runner_class: Any, sampler_class: Any, rejection_class: Any, states: Any) -> Any:
    """A runner and its samplers with the attributes that sampling needs."""
    sampler = object.__new__(sampler_class)
    sampler.logprobs_mode, sampler.compute_nans = "processed_logprobs", False
    sampler.use_fp64_gumbel = sampler.use_flashinfer = sampler.use_xpu_sampler = False
    sampler.return_sampling_mask, sampler.trace_replay_state = False, None
    sampler.req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=torch.zeros(MAX_REQS)))
    sampler.sampling_states = states(MAX_REQS, VOCAB)
    sampler.logits_processors = []
    nothing = SimpleNamespace(
        add_request=lambda *_: False, max_num_token_ids=lambda _: 0, apply=lambda *_: None
    )
    sampler.logprob_token_ids_state = sampler.thinking_budget_state = nothing
    sampler.needs_logits_processing = np.zeros(MAX_REQS, bool)
    rejecting = object.__new__(rejection_class)
    rejecting.sampler, rejecting.watermark_key, rejecting.num_speculative_steps = sampler, None, 2
    rejecting.enable_adaptive_verification = rejecting.use_block_verification = False
    rejecting.synthetic_conditional_rates = None
    runner = object.__new__(runner_class)
    runner.sampler, runner.rejection_sampler, runner.batch_sharder = sampler, rejecting, None
    runner.speculator = SimpleNamespace(draft_logits=None)
    runner.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    return runner


def add(
    runner: Any,
    index: int,
    *,
    support: bool,
    logprobs: RequestedLogprobs = NO_LOGPROBS,
    **sampling: Any,
) -> None:
    from vllm import SamplingParams

    extra = logprobs.to_extra_args() | ({SUPPORT_ARG: True} if support else {})
    runner.sampler.add_request(index, SamplingParams(logprobs=0, extra_args=extra, **sampling))


def batch(slots: Sequence[int], drafted: Sequence[int]) -> Any:
    """The step's rows, by their slots in the runner, with their numbers of draft tokens."""
    lengths = np.array(drafted) + 1
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    index = torch.tensor(slots)
    total = int(cu[-1])
    return SimpleNamespace(
        num_reqs=len(slots),
        num_draft_tokens=sum(drafted),
        idx_mapping=index,
        idx_mapping_np=np.array(slots),
        expanded_idx_mapping=index.repeat_interleave(torch.from_numpy(lengths)),
        expanded_local_pos=torch.zeros(total, dtype=torch.int32),
        cu_num_logits=torch.from_numpy(cu),
        cu_num_logits_np=cu,
        logits_indices=torch.arange(total),
        positions=torch.arange(total),
        input_ids=torch.zeros(total, dtype=torch.int64),
        seq_lens=torch.ones(len(slots), dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.ones(len(slots), dtype=torch.int32),
    )


def logits_of(num: int) -> torch.Tensor:
    return torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(num))


def ids_of(support: StepSupport, row: int, num: int) -> list[list[int]]:
    chunk = support.slice_request(row, num)
    assert chunk is not None
    return [decode_ids(encoded, VOCAB).tolist() for encoded in chunk]


def top(logits: torch.Tensor, number: int) -> list[int]:
    return sorted(logits.topk(number).indices.tolist())


def supports(output: Any) -> Any:
    """Supports that vLLM's `AsyncOutput` makes of the masks, once they are on the host."""
    tensors = output.sampling_mask_tensors
    return tensors.to_cpu_nonblocking().tolists(output.num_sampled.numpy())


def test_sampled_tokens_have_supports(runner: Any) -> None:
    add(runner, 3, support=True, top_k=4)
    add(runner, 5, support=False, top_k=4)
    add(runner, 1, support=True)
    logits = logits_of(3)
    output, *_ = runner.sample(logits.clone(), batch([5, 3, 1], [0, 0, 0]), None)
    found = supports(output)
    assert found.slice_request(0, 1) is None
    assert ids_of(found, 1, 1) == [top(logits[1], 4)]
    assert ids_of(found, 2, 1) == [list(range(VOCAB))]


def test_accepted_drafts_have_supports(runner: Any) -> None:
    add(runner, 0, support=True, top_k=3)
    add(runner, 1, support=True, top_k=5)
    logits = logits_of(6)
    output, *_ = runner.sample(logits.clone(), batch([0, 1], [2, 2]), None)
    found = supports(output)
    assert ids_of(found, 0, 3) == [top(row, 3) for row in logits[:3]]
    assert ids_of(found, 0, 2) == [top(row, 3) for row in logits[:2]]
    assert ids_of(found, 1, 1) == [top(logits[3], 5)]


def test_steps_without_a_request_for_supports_compute_none(runner: Any) -> None:
    add(runner, 0, support=True, top_k=3)
    add(runner, 1, support=False, top_k=3)
    output, *_ = runner.sample(logits_of(1), batch([1], [0]), None)
    assert output.sampling_mask_tensors is None
    add(runner, 0, support=False, top_k=3)
    output, *_ = runner.sample(logits_of(1), batch([0], [0]), None)
    assert output.sampling_mask_tensors is None


def values_of(support: StepSupport, row: int, num: int, wanted: RequestedLogprobs) -> LogprobValues:
    chunk = support.slice_request(row, num)
    assert chunk is not None
    return wanted.split(chunk)


def close(found: Any, expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(found.tolist()), expected, atol=1e-6)


@pytest.mark.parametrize("drafted", [0, 2])
def test_requested_logprobs_are_returned_with_the_supports(runner: Any, drafted: int) -> None:
    raw, given = RequestedLogprobs(given=(7,), num_raw=2), RequestedLogprobs(given=(1, 7))
    add(runner, 4, support=True, logprobs=raw, top_k=3)
    add(runner, 2, support=False, top_k=3)
    add(runner, 0, support=False, logprobs=given, top_k=30)
    width = drafted + 1
    logits = logits_of(3 * width)
    output, *_ = runner.sample(logits.clone(), batch([4, 2, 0], [drafted] * 3), None)
    found = supports(output)
    model, masked = logits.log_softmax(-1), logits.clone()
    first = values_of(found, 0, width, raw)
    assert close(first.given, model[:width, [7]])
    assert close(first.raw_top, model[:width].topk(2).values)
    assert first.raw_top_ids.tolist() == model[:width].topk(2).indices.tolist()
    sampled = output.sampled_token_ids[0, :width].long()
    assert first.raw is not None
    assert close(first.raw, model[:width].gather(1, sampled[:, None])[:, 0])
    sets = [decode_ids(row, VOCAB).tolist() for row in first.supports]
    assert sets == [top(row, 3) for row in logits[:width]]
    assert found.slice_request(1, 1) is None
    number = width if not drafted else 1
    last = masked[2 * width : 2 * width + number]
    last[last < last.topk(30).values[:, -1:]] = -torch.inf
    assert close(values_of(found, 2, number, given).given, last.log_softmax(-1)[:, [1, 7]])


@pytest.mark.parametrize("rows_per_request", [1, 3])
@pytest.mark.parametrize("vocab", [1, 2, 9, 300, 3000])
@pytest.mark.parametrize("width", [1, 40, 2048])
def test_encodings_are_those_of_the_masks(vocab: int, width: int, rows_per_request: int) -> None:
    """Of sets that the kernel has listed, of wider ones, and of slots in any order."""
    random = np.random.default_rng(vocab + width)
    shares = [0.0, 0.005, 0.05, 0.11, 0.5, 0.98, 1.0] * 3
    kept = [random.random(vocab) < share for share in shares]
    logits = torch.tensor(np.where(kept, 1.0, -np.inf))
    num_requests = len(kept) // rows_per_request
    tensors = compact(
        logits,
        torch.arange(num_requests) * rows_per_request,
        torch.full((num_requests,), rows_per_request),
        width,
        rows_per_request,
    )
    slots = random.permutation(len(kept)).tolist()[: len(kept) - 2]
    found = model_runner_v2_hooks._encode(tensors, slots)
    assert found == {slot: encode_mask(kept[slot]) for slot in slots}
