"""Patch for a crash of EngineCore on CPU: a request with a seed and a prefill in chunks.

vllm/v1/worker/gpu_model_runner.py:3502 in 0.32.0. The same loop in another vLLM backend:
https://github.com/RBLN-SW/vllm-rbln/issues/1025

A prompt that is prefilled in chunks is sampled after each chunk. All of these samples but the last
are discarded, and a seeded request's generator is rewound with `set_offset`. A CPU generator has no
offset, so the first such request raises and kills EngineCore.

Here a row whose sample is discarded has no generator while the step samples and does its
bookkeeping. Its discarded token comes from the default generator, and its own generator advances
only for used samples. So a seed gives the same tokens for every chunking and for a cached prompt.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[Any, P], T]


@contextmanager
def without_discarded_generators(runner: Any) -> Iterator[None]:
    """Hide from vLLM's sampler the generators of requests whose sample will be discarded."""
    batch = runner.input_batch
    discarded = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    held = {row: batch.generators.pop(row) for row in discarded if row in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(held)


def skip_discarded_generators(method: Method[P, T]) -> Method[P, T]:
    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with without_discarded_generators(self):
            return method(self, *args, **kwargs)

    return call


@functools.cache
def install() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    for name in ("_sample", "_bookkeeping_sync"):
        setattr(CPUModelRunner, name, skip_discarded_generators(getattr(CPUModelRunner, name)))
