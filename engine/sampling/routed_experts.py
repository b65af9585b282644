"""MoE expert ids of each token, stored per KV slot: hooks in scheduler and model runners.

vLLM's `enable_return_routed_experts` stores the experts of full blocks under the hash of their
tokens. After a weights update that keeps the KV of running samples, this store would return the
experts of the earlier weights. Here they are kept in host memory per KV slot, in parallel to the
KV: whatever KV a token reads, the experts are those that computed it. vLLM's capture of the experts
and the way of its outputs are used unchanged.

vLLM supports this in its second model runner only. The hooks at the end add it to the CPU's.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.aux_output_connector.connector import (
    AuxOutputConnectorMetadata,
    AuxOutputSchedulerConnector,
    AuxRequestOutput,
)
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput

from engine.sampling.request_hooks import num_prior_tokens

ROUTED_EXPERTS_ARG = "coppice_routed_experts"
"""Key in `extra_args` of requests whose experts are returned."""


def returns_experts(request: Any) -> bool:
    return bool((request.sampling_params.extra_args or {}).get(ROUTED_EXPERTS_ARG))


@dataclass
class SlotMetadata(AuxOutputConnectorMetadata):  # type: ignore[misc]
    """A step's block ids: per request whether they replace earlier ones, and the new ids.

    `requests` has the first position to return, for requests whose experts are returned.
    """

    blocks: dict[str, tuple[bool, list[int]]] = field(default_factory=dict)


class SlotSchedulerConnector(AuxOutputSchedulerConnector):  # type: ignore[misc]
    """Scheduler part: sends block ids instead of block hashes. Nothing refers to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: list[str] = []

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> SlotMetadata:
        blocks = {
            new.req_id: (True, new.block_ids[0]) for new in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                blocks[req_id] = (req_id in cached.resumed_req_ids, block_ids[0])
        ended, self._ended = tuple(self._ended), []
        return SlotMetadata(
            generation=0,
            requests={
                req_id: _first_position(requests[req_id])
                for req_id in scheduler_output.num_scheduled_tokens
                if returns_experts(requests[req_id])
            },
            block_hashes={},
            finished_requests=ended,
            blocks=blocks,
        )

    def take_output(self, request: Any, output: Any) -> Any:
        return super().take_output(request, output) if returns_experts(request) else None

    def request_finished(self, request: Any) -> None:
        self._ended.append(request.request_id)

    def reset(self) -> None:
        """Nothing: slots have no names that could be found again."""


def _first_position(request: Any) -> int:
    """First position to return: of the request, or after those returned before a preemption.

    Earlier tokens of a resumed response may be output tokens, too.
    """
    if request.num_output_tokens > num_prior_tokens(request.sampling_params):
        return int(request.num_tokens) - 1
    first: int = request.sampling_params.routed_experts_prompt_start
    return min(first, int(request.num_prompt_tokens))


@dataclass(slots=True)
class Running:
    """A request in the worker: its blocks, and the next positions to store and to return."""

    block_ids: list[int]
    next_stored: int | None = None
    next_returned: int | None = None


class Batch(NamedTuple):
    """The attributes of vLLM's input batch that `prepare_output` reads."""

    req_ids: list[str]
    query_start_loc_np: NDArray[Any]
    num_computed_tokens_np: NDArray[Any]


@dataclass
class PendingStep(PendingAuxOutput):  # type: ignore[misc]
    """A step whose experts are being copied, with the state of its requests."""

    running: list[Running] = field(default_factory=list)


class SlotWorkerConnector:
    """Worker part, in place of vLLM's `AuxOutputWorkerConnector`: stores experts by KV slot."""

    def __init__(self, *, vllm_config: Any, model: Any, kv_cache_config: Any) -> None:
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._capturer = RoutedExpertsCapturer(max_tokens, vllm_config)
        bind_routed_experts_capturer(model, self._capturer)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError("routed experts need a model whose layers all have one kind of KV")
        self._block_size: int = groups[0].kv_cache_spec.block_size
        self._requests: dict[str, Running] = {}
        self._lock = Lock()
        self._stores = get_tp_group().is_first_rank
        self._has_step = False
        num_slots = kv_cache_config.num_blocks * self._block_size if self._stores else 0
        # Pages are committed when they are written.
        self._experts = np.zeros(
            (num_slots, *self._capturer.shape_per_token), self._capturer.output_dtype_name
        )

    def begin_step(self, metadata: SlotMetadata | None) -> None:
        self._has_step = metadata is not None
        if metadata is None:
            return
        with self._lock:
            for req_id in metadata.finished_requests:
                self._requests.pop(req_id, None)
            for req_id, (is_new, block_ids) in metadata.blocks.items():
                if is_new or req_id not in self._requests:
                    self._requests[req_id] = Running(list(block_ids))
                else:
                    self._requests[req_id].block_ids.extend(block_ids)
            for req_id, first in metadata.requests.items():
                running = self._requests[req_id]
                if running.next_returned is None:
                    running.next_returned = first

    def prepare_output(self, batch: Any) -> PendingStep | None:
        """Snapshot of the step's experts, which is copied to the host asynchronously."""
        if not self._stores or not self._has_step:
            return None
        req_ids = list(batch.req_ids)
        starts = np.array(batch.query_start_loc_np[: len(req_ids) + 1])
        with self._lock:
            running = [self._requests[req_id] for req_id in req_ids]
        return PendingStep(
            connector=self,
            request_ids=req_ids,
            token_starts=np.array(batch.num_computed_tokens_np[: len(req_ids)]),
            query_start_loc=starts,
            routed_experts_gpu=self._capturer.snapshot_routing_data(int(starts[-1])),
            running=running,
        )

    def process_output(self, step: PendingStep) -> dict[str, AuxRequestOutput]:
        """Store a step's experts, and return those of requests that sampled tokens."""
        experts = step.routed_experts
        assert experts is not None, "the experts were copied"
        ends = step.query_start_loc[1:] - step.num_rejected
        outputs: dict[str, AuxRequestOutput] = {}
        with self._lock:
            for index, running in enumerate(step.running):
                rows = experts[step.query_start_loc[index] : ends[index]]
                end = self._store(running, int(step.token_starts[index]), rows)
                first = running.next_returned
                if first is not None and step.num_sampled[index] > 0 and first <= end:
                    found = self._experts[self._slots(running, first, end)]
                    outputs[step.request_ids[index]] = AuxRequestOutput(first, found)
                    running.next_returned = end
        return outputs

    def _store(self, running: Running, start: int, rows: NDArray[Any]) -> int:
        """Store rows from a position on; returns the position after them.

        With asynchronous scheduling, the start may count drafts that were rejected meanwhile.
        """
        if running.next_stored is not None:
            start = min(start, running.next_stored)
        end = start + len(rows)
        self._experts[self._slots(running, start, end)] = rows
        running.next_stored = end
        return end

    def _slots(self, running: Running, start: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(start, end)
        block_ids = np.array(running.block_ids, np.int64)[positions // self._block_size]
        slots: NDArray[np.int64] = block_ids * self._block_size + positions % self._block_size
        return slots

    def close(self) -> None:
        self._requests.clear()


@contextmanager
def with_own_runner() -> Iterator[None]:
    """Checks of vLLM as for a platform with its own model runner, which the hooks make of it."""
    from vllm.platforms import current_platform

    current_platform.is_out_of_tree = lambda: True
    try:
        yield
    finally:
        del current_platform.is_out_of_tree


def _checked(method: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(method)
    def verify(config: Any) -> None:
        with with_own_runner():
            method(config)

    return verify


def _with_cache(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def initialize(runner: Any, kv_cache_config: Any, *args: Any, **options: Any) -> None:
        method(runner, kv_cache_config, *args, **options)
        runner.coppice_experts = None
        if runner.vllm_config.aux_output_config.enabled:
            runner.coppice_experts = SlotWorkerConnector(
                vllm_config=runner.vllm_config, model=runner.model, kv_cache_config=kv_cache_config
            )

    return initialize


def _with_begin(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def execute(runner: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        if runner.coppice_experts is not None:
            runner.coppice_experts.begin_step(scheduler_output.aux_output_connector_metadata)
            runner.coppice_drafts = scheduler_output.scheduled_spec_decode_tokens
        return method(runner, scheduler_output, *args, **options)

    return execute


def _with_output(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def sample(runner: Any, *args: Any, **options: Any) -> Any:
        output = method(runner, *args, **options)
        if runner.coppice_experts is not None and getattr(output, "sampled_token_ids", None):
            output.aux_output_connector_output = _processed(runner, output)
        return output

    return sample


def _processed(runner: Any, output: Any) -> Any:
    batch = Batch(
        req_ids=output.req_ids,
        query_start_loc_np=runner.query_start_loc.np,
        num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu,
    )
    step = runner.coppice_experts.prepare_output(batch)
    if step is None:
        return None
    sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
    drafted = np.array([len(runner.coppice_drafts.get(req_id, ())) for req_id in output.req_ids])
    # A request has drafts only in steps that sample.
    step.enqueue_cpu_copy(sampled, np.where(drafted > 0, drafted + 1 - sampled, 0))
    return step.process_output()


@functools.cache
def install_in_scheduler() -> None:
    from vllm.v1.core.sched import scheduler

    scheduler.AuxOutputSchedulerConnector = SlotSchedulerConnector


@functools.cache
def accept_cpu_runner() -> None:
    """Let vLLM's check of the configuration accept the CPU runner, in the service's process."""
    from vllm.config.vllm import VllmConfig

    check = VllmConfig._verify_aux_output_compatibility
    VllmConfig._verify_aux_output_compatibility = _checked(check)


@functools.cache
def install_on_cpu() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    accept_cpu_runner()  # EngineCore repeats the check
    hooks = {
        "initialize_kv_cache": _with_cache,
        "execute_model": _with_begin,
        "sample_tokens": _with_output,
    }
    for name, hook in hooks.items():
        setattr(CPUModelRunner, name, hook(getattr(CPUModelRunner, name)))
    install_in_scheduler()


@functools.cache
def install_on_gpu() -> None:
    from vllm.v1.worker.gpu import model_runner

    def connector(model: Any, vllm_config: Any, kv_cache_config: Any) -> SlotWorkerConnector:
        return SlotWorkerConnector(
            vllm_config=vllm_config, model=model, kv_cache_config=kv_cache_config
        )

    model_runner.get_aux_output_connector = connector
    install_in_scheduler()
