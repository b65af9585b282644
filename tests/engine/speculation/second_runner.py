"""EngineCore's loop with Model Runner V2 on a machine without a GPU, as far as drafts go.

EngineCore's loop, the asynchronous scheduler, the request states and the preparation of a step's
inputs are vLLM's own. Replaced are the Triton kernels, by the same operations in torch, and the
model. It reads its context from a cache of the tokens that were its inputs, so a wrong input token
changes the text.
"""

import pickle
import queue
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.speculation.controller import Controller
from engine.speculation.core.scheduler_drafts import SchedulerDrafts
from engine.speculation.counters import Counters
from engine.speculation.request_table import GROUP_ARG
from engine.speculation.settings import SpeculationSettings
from engine.speculation.worker import gpu_speculator
from kernels.draft_index.store_protocol import Store
from tests.engine.made_arguments import engine_arguments
from tests.engine.seedling import MODEL, settings
from tests.engine.speculation.fake_gpu import (
    KERNELS,
    Clock,
    DeviceTensor,
    NextToken,
    Result,
    SharedTensor,
    step_seconds,
)

CPU = torch.device("cpu")
LONGEST, ROWS, CONTEXT, BLOCK = 4, 8, 256, 16


@contextmanager
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.v1.worker.gpu import model_runner, states

    monkeypatch.setattr(states, "StagedWriteTensor", DeviceTensor)
    monkeypatch.setattr(states, "UvaBackedTensor", SharedTensor)
    for kernel in KERNELS:
        monkeypatch.setattr(model_runner, kernel.__name__, kernel)
    runner = model_runner.GPUModelRunner
    monkeypatch.setattr(runner, "prepare_inputs", runner.prepare_inputs)  # restored after the test
    gpu_speculator.load_drafts_before_inputs.cache_clear()
    yield
    gpu_speculator.load_drafts_before_inputs.cache_clear()


def vllm_config(*, is_async: bool = True, **changes: Any) -> Any:
    """The configuration of an engine on a GPU with sibling drafts.

    vLLM switches asynchronous scheduling off on this machine, because of its platform.
    """
    engine = settings(
        max_context_tokens=CONTEXT,
        max_sequences=ROWS,
        max_batched_tokens=64,
        block_size=BLOCK,
        **changes,
    )
    speculation = SpeculationSettings(mode="siblings", longest_draft=LONGEST)
    arguments = engine_arguments(engine, MODEL, speculation=speculation, on_cpu=False)
    config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = is_async
    return config


class Executor:
    """Executor of one worker."""

    def __init__(self, config: Any, next_token: NextToken) -> None:
        self.runner, self._next_token = _runner(config), next_token
        self.clock = Clock()
        self.num_accepted = 0
        self.preempted: list[str] = []
        self._tokens = torch.zeros(ROWS, config.model_config.max_model_len, dtype=torch.int64)
        self._batch: Any = None
        self.shapes: list[list[int]] = []
        """Numbers of query tokens of the rows, step by step."""

    def execute_model(self, output: Any, non_block: bool = False) -> Future[Any]:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Methods

        runner: Any = self.runner
        output = pickle.loads(pickle.dumps(output))  # as it is sent to several workers
        self.preempted += output.preempted_req_ids or ()
        for update in ("finish_requests", "add_requests", "update_requests"):
            getattr(Methods, update)(runner, output)
        self._batch = None
        if output.total_num_scheduled_tokens:
            state, _ = Methods.gather_batch_req_state(runner, output, False)
            assert state is not None
            graph: Any = SimpleNamespace(num_tokens=state.num_tokens, num_reqs=None)
            self._batch = Methods.prepare_inputs(runner, output, state, graph, 0)
            self.shapes.append(state.num_scheduled_tokens.tolist())
        return Result(None if self._batch else _output([], []), self.clock, 0.0)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Methods

        batch, runner = self._batch, self.runner
        rows = [self._sample(row) for row in range(batch.num_reqs)]
        num_sampled = torch.tensor([len(tokens) for tokens in rows])
        num_logits = torch.as_tensor(batch.cu_num_logits).diff()
        rejected = torch.where(num_sampled > 0, num_logits - num_sampled, 0)
        padded = torch.zeros(len(rows), LONGEST + 1, dtype=torch.int64)
        for row, tokens in enumerate(rows):
            padded[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        Methods.postprocess_sampled(
            runner, batch.idx_mapping, padded, num_sampled, rejected, batch.query_start_loc
        )
        drafts = runner.speculator.propose(batch)
        drafts[:, 0:] = -1  # as vLLM does for the draft length 0
        runner.req_states.draft_tokens[batch.idx_mapping] = drafts
        self.num_accepted += sum(len(tokens) - 1 for tokens in rows if tokens)
        ready = self.clock.launch(step_seconds(batch.num_tokens))
        result = Result(_output(batch.req_ids, rows), self.clock, ready)
        return result if non_block else result.result()

    def take_draft_token_ids(self) -> Any:
        """The drafts of vLLM's own method, without asynchronous scheduling: none."""
        from vllm.v1.outputs import DraftTokenIds

        ids = self._batch.req_ids
        return DraftTokenIds(ids, [[] for _ in ids])

    def _sample(self, row: int) -> list[int]:
        """Greedy verification of one row; no tokens while its prompt is incomplete."""
        batch, name = self._batch, self._batch.req_ids[row]
        begin, end = batch.query_start_loc_np[row : row + 2].tolist()
        inputs, positions = batch.input_ids[begin:end], batch.positions[begin:end]
        assert int(inputs.min()) >= 0, "a token id outside of the vocabulary"
        cache = self._tokens[int(batch.idx_mapping[row])]
        cache[positions.long()] = inputs.long()
        if int(batch.seq_lens[row]) < int(batch.prefill_len_np[row]):
            return []
        sampled: list[int] = []
        for index in batch.logits_indices[slice(*batch.cu_num_logits_np[row : row + 2])].tolist():
            if sampled and int(batch.input_ids[index]) != sampled[-1]:
                break
            context = cache[: int(batch.positions[index]) + 1].tolist()
            sampled.append(self._next_token(name, context))
        return sampled


def _output(ids: Sequence[str], rows: list[list[int]]) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    index = {name: row for row, name in enumerate(ids)}
    return ModelRunnerOutput(req_ids=list(ids), req_id_to_index=index, sampled_token_ids=rows)


def _runner(config: Any) -> Any:
    """The parts of vLLM's `GPUModelRunner` that a step's input tokens depend on."""
    from vllm.v1.worker.gpu.input_batch import InputBuffers
    from vllm.v1.worker.gpu.states import RequestState

    length, tokens = config.model_config.max_model_len, 64 + ROWS * (LONGEST + 1)
    states = RequestState(ROWS, length, tokens, LONGEST, 512, CPU)
    ignore = SimpleNamespace(
        append_block_ids=lambda *_, **__: None,
        add_request=lambda *_: None,
        remove_request=lambda *_: None,
        apply_staged_writes=lambda: None,
        postprocess_state=lambda *_: None,
        num_new_sampled_tokens_per_step=1,
    )
    none = dict.fromkeys(
        ("pooling_runner", "pp_handler", "encoder_cache", "prompt_logprobs_worker", "sampler")
        + ("adaptive_verification", "pcp_manager", "fast_prefill", "kv_block_zeroer")
    )
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner = object.__new__(GPUModelRunner)
    runner.__dict__ |= none | {
        "device": CPU,
        "req_states": states,
        "speculator": gpu_speculator.SiblingSpeculator(config, CPU, states),
        "model_state": ignore,
        "block_tables": ignore,
        "lora_state": ignore,
        "model_config": config.model_config,
        "input_buffers": InputBuffers(max_num_reqs=ROWS, max_num_tokens=tokens, device=CPU),
        "max_num_reqs": ROWS,
        "decode_query_len": LONGEST + 1,
        "is_last_pp_rank": False,
        "use_pp": False,
    }
    return runner


class Engine:
    """EngineCore with sibling drafts; `step` is one pass of its loop."""

    def __init__(self, config: Any, next_token: NextToken, *, num_blocks: int = 200) -> None:
        from vllm.v1.engine.core import EngineCore

        self.executor = Executor(config, next_token)
        self.scheduler = _scheduler(config, num_blocks)
        self.texts: dict[str, list[int]] = {}
        self.counts = Counters()
        self.drafts: Any = None
        self.core: Any = object.__new__(EngineCore)
        self.core.__dict__ |= {
            "vllm_config": config,
            "scheduler": self.scheduler,
            "model_executor": self.executor,
            "batch_queue": deque(maxlen=2),
            "batch_queue_size": 2,
            "aborts_queue": queue.Queue(),
            "is_mm_encoder_only": False,
            "is_pooling_model": False,
            "log_stats": False,
            "_weight_version": "0",
            "async_scheduling": config.scheduler_config.async_scheduling,
            "check_for_draft_tokens": True,
        }
        self._step = self.core.step_with_batch_queue
        if not config.scheduler_config.async_scheduling:
            self._step = self.core.step

    def draft_nothing(self) -> None:
        lookup = self.scheduler.dynamic_sd_lookup
        lookup[:] = [0] * len(lookup)

    def draft_with(self, store: Store, controller: Controller, **changes: Any) -> SchedulerDrafts:
        options: dict[str, Any] = {
            "max_draft_tokens": LONGEST,
            "max_samples": dict.fromkeys(range(LONGEST + 1), ROWS),
            "weights": lambda: self.core._weight_version,
            "clock": self.executor.clock,
        }
        drafts = SchedulerDrafts(
            self.scheduler, store, controller, self.counts, **(options | changes)
        )
        drafts.attach()
        return drafts

    def add(self, name: str, prompt: Sequence[int], *, tokens: int = 40, **params: Any) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params.setdefault("extra_args", {GROUP_ARG: "g"})
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, **params)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
        )
        self.texts[name] = []
        self.scheduler.add_request(request)

    def step(self) -> None:
        outputs, executed = self._step()
        self.core.post_step(executed)
        for output in (outputs or {}).values():
            for each in output.outputs:
                self.texts[each.request_id] += each.new_token_ids

    def run(self) -> dict[str, list[int]]:
        """Run until all requests have finished; returns their texts."""
        while self.scheduler.has_requests() or self.core.batch_queue:
            self.step()
        return self.texts


def _scheduler(config: Any, num_blocks: int) -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.enable_prefix_caching = False  # each row has its own cache here
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    caches = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    cls = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=caches,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )
    scheduler.use_v2_model_runner = True  # without Triton, the configuration has the first
    return scheduler


PROMPT = range(3, 20)


def add_group(engine: Engine, number: int = 5, *, apart: int = 5, **params: Any) -> Engine:
    """Add siblings that start some steps after one another."""
    for row in range(number):
        engine.add(f"r{row}", PROMPT, **params)
        for _ in range(apart):
            engine.step()
    return engine
