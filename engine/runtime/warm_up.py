"""Callbacks after vLLM's warm-up of a GPU worker, before the first request.

vLLM warms up with real scheduler outputs (vllm/v1/worker/gpu/warmup.py), then captures CUDA graphs.
When the callbacks run, the weights, the KV cache, the metadata builders and the graphs are in place
and no request exists. All ranks run them, in the same order, so they may use collectives. They run
before vLLM reports kernels that are compiled late. A CPU worker has no such warm-up.
"""

import functools
from collections.abc import Callable
from typing import Any

WarmedUp = Callable[[Any], None]
"""Callback with vLLM's worker. It must not raise."""

_callbacks: list[WarmedUp] = []


def on_warmed_up(callback: WarmedUp) -> None:
    """Call a function whenever a GPU worker of this process has warmed up. Idempotent."""
    _install()
    if callback not in _callbacks:
        _callbacks.append(callback)


def after_warm_up(activate: Callable[[Any], None]) -> Callable[[Any], None]:
    """`Worker._maybe_activate_jit_monitor`, which vLLM calls once all of its warm-up is done."""

    @functools.wraps(activate)
    def maybe_activate_jit_monitor(self: Any) -> None:
        for callback in _callbacks:
            callback(self)
        activate(self)

    return maybe_activate_jit_monitor


@functools.cache
def _install() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    Worker._maybe_activate_jit_monitor = after_warm_up(Worker._maybe_activate_jit_monitor)
