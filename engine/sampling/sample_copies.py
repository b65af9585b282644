"""Samples of a group that differ in id and seed only, submitted to EngineCore in one message.

vLLM's `AsyncLLM.add_request` validates and sends each sample with its own copy of the prompt, also
those of its fan-out (n > 1), whose samples cannot be aborted alone. Here the first sample is
validated, and the others are copies of its request (`engine/sampling/request_copies.py`).
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from engine.sampling.request_copies import COPIES_ARG, copy_of
from engine.types.samples import SampleRequest

ARRIVAL_STEP = 1e-6
"""Seconds between the arrival of two samples: vLLM schedules equal priorities in this order."""


OWN_FIELDS = frozenset(("id", "seed", "on_tokens", "multimodal_input", "export", "load"))
_common = attrgetter(*(each.name for each in fields(SampleRequest) if each.name not in OWN_FIELDS))


def runs_of_copies(samples: Sequence[SampleRequest]) -> Iterator[list[SampleRequest]]:
    """The samples in their order, in runs that can be submitted in one message each."""
    run = list[SampleRequest]()
    for sample in samples:
        if run and not _is_copy(sample, run[0]):
            yield run
            run = []
        run.append(sample)
    if run:
        yield run


def _is_copy(sample: SampleRequest, other: SampleRequest) -> bool:
    """True if vLLM's requests of two samples differ in id and seed only.

    Samples with images, and those that transfer KV, are no copies.
    """
    if not (_is_plain(sample) and _is_plain(other)):
        return False
    same_seeds = (sample.seed is None) == (other.seed is None)
    same_streams = (sample.on_tokens is None) == (other.on_tokens is None)
    return same_seeds and same_streams and bool(_common(sample) == _common(other))


def _is_plain(sample: SampleRequest) -> bool:
    return sample.multimodal_input is None and sample.export is None and sample.load is None


async def add_copies(
    llm: AsyncLLM, request: EngineCoreRequest, samples: Sequence[SampleRequest]
) -> list[RequestOutputCollector]:
    """Submit the samples of a run to one engine; `request` is the validated one of the first."""
    if llm.errored:
        raise EngineDeadError()
    first = request.arrival_time
    requests = [
        copy_of(request, sample.id, sample.seed, first + number * ARRIVAL_STEP)
        for number, sample in enumerate(samples)
    ]
    llm._run_output_handler()
    llm.check_admission(len(requests), request.request_id)
    queues = list[RequestOutputCollector]()
    for each in requests:
        llm.input_processor.assign_request_id(each)
        queues.append(RequestOutputCollector(each.params.output_kind, each.request_id))
        llm.output_processor.add_request(each, None, queue=queues[-1])
    await llm.engine_core.add_request_async(_message(requests))
    return queues


def _message(requests: Sequence[EngineCoreRequest]) -> EngineCoreRequest:
    """The last request, with the ids, seeds and arrival times of the others."""
    *others, last = requests
    found: Any = copy.copy(last)
    params = found.sampling_params = copy.copy(last.sampling_params)
    copies = [(each.request_id, each.sampling_params.seed, each.arrival_time) for each in others]
    params.extra_args = {**(params.extra_args or {}), COPIES_ARG: copies}
    return found
