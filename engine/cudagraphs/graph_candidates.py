"""Patch of vLLM's CUDA graph manager: only the planned graphs are captured and dispatched.

https://github.com/vllm-project/vllm/pull/56136

vLLM's second model runner (vllm/v1/worker/gpu/cudagraph_utils.py in 0.32.0) captures a graph for
every capture size with every draft length of the schedule. This patch filters its candidates to the
plan, and checks after capture that the planned graphs were captured. At dispatch, vLLM considers
only graphs of the next captured number of tokens, and misses larger ones of the right draft length.
The candidates of a plan contain a graph of each length for every number of tokens.

Only the target model's manager is filtered. The graphs of a separate draft model follow the plan by
themselves (engine/drafter/worker/draft_graphs.py), and draft heads have schedules of their own.
"""

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from engine.attention.cuda_steps import is_dummy_step, step_shares
from engine.cudagraphs.counters import COUNTERS
from engine.cudagraphs.plan_from_environment import graph_plan
from engine.cudagraphs.planner import Plan
from engine.cudagraphs.shapes import GraphShape
from engine.runtime.feature_guard import feature

FEATURE = feature("counting of graphs")


class GraphPlanMismatch(RuntimeError):
    """The graphs that vLLM can capture, or has captured, differ from the plan."""


def filter_candidates(manager: Any, plan: Plan) -> None:
    """Restrict the graphs that vLLM's CUDA graph manager captures and uses to the plan."""
    mode = manager.cudagraph_mode
    if not mode.separate_routine():
        raise GraphPlanMismatch(
            f"vLLM captures no graphs of decode steps with this attention backend (mode "
            f"{mode.name}), so none can be planned: remove graphs.budget_bytes"
        )
    wanted = set(plan.shapes)
    kept = {
        mode: [desc for desc in descs if _shape(desc) in wanted]
        for mode, descs in manager._capture_descs.items()
    }
    manager._capture_descs = {mode: descs for mode, descs in kept.items() if descs}
    candidates = [desc for descs in manager._capture_descs.values() for desc in descs]
    _check_shapes(plan, candidates, "vLLM can capture")
    manager._candidates = candidates_by_num_tokens(candidates)


def candidates_by_num_tokens(descs: Iterable[Any]) -> dict[tuple[int, int], list[Any]]:
    """CUDA graphs that can run a batch, by number of tokens and number of active LoRAs.

    For each, the smallest graph of each query length that is large enough: decode graphs first, as
    vLLM prefers them, and the mixed one last.
    """
    rungs: dict[tuple[int, int | None], list[Any]] = {}
    for desc in sorted(descs, key=lambda desc: desc.num_tokens):
        rungs.setdefault((desc.num_active_loras, desc.uniform_token_count), []).append(desc)
    found: dict[tuple[int, int], list[Any]] = {}
    for loras, query_len in sorted(rungs, key=lambda ladder: (ladder[0], ladder[1] is None)):
        ladder = rungs[loras, query_len]
        sizes = [desc.num_tokens for desc in ladder]
        for tokens in range(sizes[-1] + 1):
            room = ladder[bisect_left(sizes, tokens)]
            found.setdefault((tokens, loras), []).append(room)
    return found


def check_captured(manager: Any, plan: Plan, measured_bytes: int) -> None:
    """Check that vLLM captured exactly the planned CUDA graphs, and record their memory.

    Mixed graphs may be held by wrappers of model parts.
    """
    decoding = [desc for desc in manager.graphs if _shape(desc) is not None]
    in_parts = [
        desc
        for descs in manager._capture_descs.values()
        for desc in descs
        if desc.uniform_token_count is None
    ]
    _check_shapes(plan, [*decoding, *in_parts], "were captured")
    COUNTERS.set_plan(plan, measured_bytes)


def count(desc: Any, num_reqs: int, query_len: int | None, max_query_len: int | None) -> None:
    """Count whether a step runs with a planned CUDA graph.

    vLLM passes no `max_query_len` for steps with prefill. Steps with shared prefixes use the same
    graphs as these.
    """
    if is_dummy_step():
        return
    if step_shares() or (query_len is None and max_query_len is None):
        COUNTERS.record_mixed()
    else:
        hit = desc.uniform_token_count is not None
        COUNTERS.record_decode(samples=num_reqs, query_len=query_len, hit=hit)


def _shape(desc: Any) -> GraphShape | None:
    """Shape of a vLLM graph descriptor, or None if no plan can contain such a graph."""
    if desc.num_ubatches > 1 or desc.max_query_len is not None:
        return None
    return GraphShape(desc.num_tokens, desc.uniform_token_count)


def _check_shapes(plan: Plan, descs: Iterable[Any], what: str) -> None:
    planned, there = set(plan.shapes), {_shape(desc) for desc in descs}
    if planned != there:
        missing = ", ".join(sorted(map(str, planned - there))) or "none"
        more = ", ".join(sorted(map(str, there - planned))) or "none"
        raise GraphPlanMismatch(
            f"{len(planned)} CUDA graphs are planned, {len(there)} {what}; missing: {missing}; "
            f"not planned: {more} (samples x tokens each). Set graphs.lengths to the draft "
            "lengths that the engine uses, or remove graphs.budget_bytes to use vLLM's graphs"
        )


def install() -> None:
    plan = graph_plan()
    if plan is not None:
        install_plan(plan)


def install_plan(plan: Plan) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    for name, method in patched_methods(ModelCudaGraphManager, plan).items():
        setattr(ModelCudaGraphManager, name, method)


def patched_methods(manager: Any, plan: Plan) -> dict[str, Callable[..., Any]]:
    """Methods of vLLM's CUDA graph manager, wrapped so that they follow the plan."""
    return {
        "_init_candidates": _filtering(plan, manager._init_candidates),
        "capture": _checking(plan, manager.capture),
        "dispatch": _counting(manager.dispatch),
    }


def _filtering(plan: Plan, init: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(init)
    def _init_candidates(self: Any) -> None:
        init(self)
        filter_candidates(self, plan)

    return _init_candidates


def _checking(plan: Plan, capture: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(capture)
    def checked_capture(self: Any, *args: Any, **named: Any) -> None:
        from torch import accelerator

        if self._max_full_descs_to_capture is not None:  # vLLM profiles two graphs first
            capture(self, *args, **named)
            return
        before = accelerator.get_memory_info()[0]
        capture(self, *args, **named)
        accelerator.synchronize()
        check_captured(self, plan, before - accelerator.get_memory_info()[0])

    return checked_capture


def _counting(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    counted = FEATURE.guarded_with_default(None)(count)

    @functools.wraps(dispatch)
    def dispatched(
        self: Any,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        *args: Any,
        **named: Any,
    ) -> Any:
        desc = dispatch(self, num_reqs, num_tokens, uniform_token_count, *args, **named)
        counted(desc, num_reqs, uniform_token_count, named.get("max_query_len"))
        return desc

    return dispatched
