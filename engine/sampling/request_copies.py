"""Samples that differ in id and seed only, in EngineCore: created from one vLLM request.

A request whose `extra_args` have `COPIES_ARG` stands for a whole group: the argument has the id,
the seed and the arrival time of each sample that precedes the request's own. So EngineCore decodes
the prompt and the parameters once, and computes the hashes of the prompt's blocks once.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

COPIES_ARG = "coppice_copies"
Preprocess = Callable[[Any, Any], tuple[Any, int]]


def copy_of(request: Any, request_id: str, seed: int | None, arrival_time: float) -> Any:
    """A copy of an EngineCoreRequest for another sample; the two share the prompt."""
    found = copy.copy(request)
    found.request_id, found.arrival_time = request_id, arrival_time
    params = found.sampling_params = copy.copy(request.sampling_params)
    params.seed = seed
    if params.extra_args is not None:
        params.extra_args = dict(params.extra_args)
    return found


def take_copies(request: Any) -> list[Any]:
    """The requests of the samples that precede a request's own, which then stands for one."""
    params = request.sampling_params
    copies = ((params and params.extra_args) or {}).get(COPIES_ARG)
    if not copies:
        return []
    rest = {name: each for name, each in params.extra_args.items() if name != COPIES_ARG}
    params.extra_args = rest or None
    return [copy_of(request, *each) for each in copies]


def preprocess_group(preprocess: Preprocess) -> Preprocess:
    """Wrapper of `EngineCore.preprocess_add_request`, which runs in the thread that reads messages.

    The samples enter the input queue one by one, in their order, before any later message. An error
    concerns one sample.
    """

    @functools.wraps(preprocess)
    def preprocess_all(core: Any, request: Any) -> tuple[Any, int]:
        copies = take_copies(request)
        return (
            _with_copies(preprocess, core, copies, request) if copies else preprocess(core, request)
        )

    return preprocess_all


def _with_copies(
    preprocess: Preprocess, core: Any, copies: list[Any], request: Any
) -> tuple[Any, int]:
    from vllm.v1.engine import EngineCoreRequestType

    hasher, ready = core.request_block_hasher, list[tuple[Any, int]]()

    def preprocess_next(each: Any) -> tuple[Any, int]:
        found, wave = preprocess(core, each)
        found._block_hasher = hasher
        if hasher is not None:
            hashes = found.block_hashes
            core.request_block_hasher = lambda _: hashes
        return found, wave

    try:
        for each in copies:
            try:
                ready.append(preprocess_next(each))
            except Exception:  # as vLLM's thread does for one request
                core._handle_request_preproc_error(each)
        return preprocess_next(request)
    finally:
        core.request_block_hasher = hasher
        for each in ready:  # together, so that they are scheduled together
            core.input_queue.put_nowait((EngineCoreRequestType.ADD, each))


@functools.cache
def install() -> None:
    from vllm.v1.engine.core import EngineCore

    EngineCore.preprocess_add_request = preprocess_group(EngineCore.preprocess_add_request)
