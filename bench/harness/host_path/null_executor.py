"""Executor of vLLM whose steps return token ids and logprobs at once, without a forward pass.

It runs the ordinary worker of the platform in EngineCore's process, as vLLM does for one GPU: the
worker loads the model and answers all calls except those of a step. So what remains of a step is
the work of the processes around the model.

vLLM's CPU platform disables asynchronous scheduling, because its model runner computes at once.
This executor does not use that runner, and enables it again, as on a GPU: EngineCore creates its
scheduler and its queue of two steps after the executor.
"""

from concurrent.futures import Future
from typing import Any, Final

import numpy as np
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

EXECUTOR: Final = f"{__name__}.NullExecutor"
FIRST_ID, NUM_IDS = 100, 397
NUM_ROWS = 4096
"""Length of the tables of values, from which a step of at most half as many rows takes a part."""
SUPPORT_ARG = "coppice_support"
SUPPORT_BYTES = 24


class NullExecutor(UniProcExecutor):  # type: ignore[misc]  # vLLM's types are not followed
    def _init_executor(self) -> None:
        super()._init_executor()
        self.vllm_config.scheduler_config.async_scheduling = True
        self._runner = NullRunner()
        self._scheduled: Any = None

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            self._runner.update(scheduler_output)
            return _result(EMPTY_MODEL_RUNNER_OUTPUT, non_block=non_block)
        self._scheduled = scheduler_output
        return _result(None, non_block=non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _result(self._runner.step(self._scheduled), non_block=non_block)


def _result(value: Any, *, non_block: bool) -> Any:
    if not non_block:
        return value
    future = Future[Any]()
    future.set_result(value)
    return future


class NullRunner:
    """Outputs of steps: one token of each request whose context is computed in the step."""

    def __init__(self) -> None:
        self._missing = dict[str, int]()
        """Number of tokens of each request's context that no step has been given yet."""
        self._prompt_lengths = dict[str, int]()
        self._num_logprobs = dict[str, int]()
        self._with_support = set[str]()
        self._num_steps = 0
        draw = np.random.default_rng(0)
        self._ids = draw.integers(FIRST_ID, FIRST_ID + NUM_IDS, NUM_ROWS, dtype=np.int32)
        self._lists = [[token] for token in self._ids.tolist()]
        self._logprobs = -draw.exponential(1.0, NUM_ROWS).astype(np.float32)
        self._tables = dict[int, LogprobsLists]()

    def update(self, scheduler_output: Any) -> None:
        """Take new and finished requests, as a model runner before each step."""
        for request_id in scheduler_output.finished_req_ids:
            self._missing.pop(request_id, None)
            self._prompt_lengths.pop(request_id, None)
            self._num_logprobs.pop(request_id, None)
            self._with_support.discard(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            self._add(new)
        cached = scheduler_output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for row, request_id in enumerate(cached.req_ids):
                if request_id in cached.resumed_req_ids:
                    length = self._prompt_lengths[request_id] + cached.num_output_tokens[row]
                    self._missing[request_id] = length - cached.num_computed_tokens[row]

    def _add(self, new: Any) -> None:
        params, name = new.sampling_params, new.req_id
        self._prompt_lengths[name] = new.prompt_len
        self._missing[name] = new.prompt_len - new.num_computed_tokens
        if params.logprobs is not None:
            self._num_logprobs[name] = params.logprobs
        if params.extra_args and params.extra_args.get(SUPPORT_ARG):
            self._with_support.add(name)

    def step(self, scheduler_output: Any) -> ModelRunnerOutput:
        self.update(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        request_ids = list(scheduled)
        num_rows = len(request_ids)
        assert num_rows <= NUM_ROWS // 2, "more rows than the tables have"
        self._num_steps += 1
        start = self._num_steps * 31 % (NUM_ROWS // 2)
        sampled = self._lists[start : start + num_rows]
        if self._missing:
            self._hold_back(request_ids, scheduled, sampled)
        width = max(self._num_logprobs.values(), default=None)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index=dict(zip(request_ids, range(num_rows), strict=True)),
            sampled_token_ids=sampled,
            logprobs=None if width is None else self._rows(width, start, num_rows),
            sampling_masks=self._supports(request_ids) if self._with_support else None,
        )

    def _hold_back(
        self, request_ids: list[str], scheduled: dict[str, int], sampled: list[list[int]]
    ) -> None:
        """Sample nothing for requests whose context is not computed with this step."""
        for row, name in enumerate(request_ids):
            if name in self._missing:
                missing = self._missing.pop(name) - scheduled[name]
                if missing > 0:
                    self._missing[name] = missing
                    sampled[row] = []

    def _rows(self, width: int, start: int, num_rows: int) -> LogprobsLists:
        """Rows of the tables from a start on; the first logprob is the sampled token's."""
        if width not in self._tables:
            others = np.arange(width, dtype=np.int32)[None, :]
            self._tables[width] = LogprobsLists(
                np.concatenate([self._ids[:, None], (self._ids[:, None] + others) % NUM_IDS], 1),
                np.cumsum(np.tile(self._logprobs[:, None], (1, width + 1)), 1, dtype=np.float32),
                np.ones(NUM_ROWS, np.int32),
            )
        ids, logprobs, ranks, _ = self._tables[width]
        rows = slice(start, start + num_rows)
        return LogprobsLists(ids[rows], logprobs[rows], ranks[rows])

    def _supports(self, request_ids: list[str]) -> Any:
        """Supports as the engine's hooks of the model runners return them."""
        from engine.sampling.step_supports import StepSupport

        row = [b"\x01" + bytes(SUPPORT_BYTES - 1)]
        wanted = self._with_support
        return StepSupport({n: row for n, name in enumerate(request_ids) if name in wanted})
