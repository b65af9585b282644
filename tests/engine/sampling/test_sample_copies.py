"""Samples that differ in id and seed only: one message, and their requests in EngineCore."""

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from engine.sampling.request_copies import preprocess_group
from engine.sampling.sample_copies import add_copies, runs_of_copies
from engine.types.kv import ExportSlot, KvLoad
from engine.types.samples import SampleRequest, Sampling, StructuredOutputs

BLOCK = 4
SAMPLE = SampleRequest(
    id="0", prompt_token_ids=list(range(3, 14)), sampling=Sampling(max_tokens=4), seed=0
)
SLOT = ExportSlot(arena=Path("arena"), offset=64, status_offset=0, num_tokens=4)
PREPROCESS: Any = preprocess_group(EngineCore.preprocess_add_request)


def samples_of(number: int) -> list[SampleRequest]:
    return [replace(SAMPLE, id=str(each), seed=10 + each) for each in range(number)]


@dataclass
class Llm:
    """The parts of AsyncLLM that receive requests."""

    errored: bool = False
    messages: list[EngineCoreRequest] = field(default_factory=list)
    states: dict[str, EngineCoreRequest] = field(default_factory=dict)
    num_admitted: int = 0

    @property
    def input_processor(self) -> Any:
        return InputProcessor

    @property
    def output_processor(self) -> Any:
        return self

    @property
    def engine_core(self) -> Any:
        return self

    def _run_output_handler(self) -> None:
        pass

    def check_admission(self, number: int, _: str) -> None:
        self.num_admitted += number

    def add_request(self, request: EngineCoreRequest, prompt: None, *, queue: Any) -> None:
        assert queue.request_id == request.request_id
        self.states[request.request_id] = request

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.messages.append(
            MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
        )


@dataclass
class Core:
    """The parts of EngineCore that receive requests."""

    mm_receiver_cache: None = None
    num_hashed: int = 0
    failed: list[str] = field(default_factory=list)
    input_queue: Any = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK, sha256)

        def counted(request: Request) -> Any:
            self.num_hashed += 1
            return hasher(request)

        self.request_block_hasher: Any = counted

    def _handle_request_preproc_error(self, request: EngineCoreRequest) -> None:
        self.failed.append(request.request_id)

    def receive(self, message: EngineCoreRequest, preprocess: Any = PREPROCESS) -> list[Request]:
        self.input_queue.put((EngineCoreRequestType.ADD, preprocess(self, message)))
        found = []
        while not self.input_queue.empty():
            kind, (request, wave) = self.input_queue.get()
            assert (kind, wave) == (EngineCoreRequestType.ADD, 0)
            found.append(request)
        return found


def request_of(sample: SampleRequest, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=sample.id,
        prompt_token_ids=list(sample.prompt_token_ids),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=4, seed=sample.seed, skip_clone=True, **params),
        pooling_params=None,
        arrival_time=1e9,
        lora_request=None,
        cache_salt="salt",
        data_parallel_rank=None,
        priority=7,
        session_id="session",
    )


def received_alone(core: Core, request: EngineCoreRequest) -> Request:
    """The request that vLLM makes of a message, without our wrapper."""
    [found] = core.receive(request, EngineCore.preprocess_add_request)
    return found


def fields(request: Request) -> dict[str, Any]:
    """Values of a request, without the objects that only it has."""
    own = ("arrival_time", "_block_hasher", "output_token_ids", "all_token_ids", "prefill_stats")
    return {name: each for name, each in vars(request).items() if name not in own}


async def submitted(samples: Sequence[SampleRequest], **params: Any) -> Llm:
    llm: Any = Llm()
    await add_copies(llm, request_of(samples[0], **params), samples)
    return llm  # type: ignore[no-any-return]


@pytest.mark.parametrize("extra_args", [None, {"coppice_group": "g"}])
async def test_requests_of_a_message_are_those_of_single_messages(extra_args: Any) -> None:
    samples = samples_of(5)
    llm = await submitted(samples, extra_args=extra_args)
    [message] = llm.messages
    core, plain = Core(), Core()
    found = core.receive(message)
    expected = [received_alone(plain, each) for each in llm.states.values()]
    assert [fields(each) for each in found] == [fields(each) for each in expected]
    assert [each.sampling_params.seed for each in found] == [each.seed for each in samples]
    assert [each.request_id.split("-")[0] for each in found] == [each.id for each in samples]
    assert sorted(found) == found  # the order in which vLLM schedules equal priorities
    assert (core.num_hashed, plain.num_hashed) == (1, 5)
    assert llm.num_admitted == 5


async def test_requests_of_a_message_go_on_alone() -> None:
    llm, core, plain = await submitted(samples_of(3)), Core(), Core()
    found = core.receive(llm.messages[0])
    for number, request in enumerate(found):
        assert request._block_hasher is core.request_block_hasher
        request.append_output_token_ids([number])
    lone = [
        plain.receive(each, EngineCore.preprocess_add_request)[0] for each in llm.states.values()
    ]
    for number, request in enumerate(lone):
        request.append_output_token_ids([number])
    assert [each.block_hashes for each in found] == [each.block_hashes for each in lone]
    assert len({each.block_hashes[-1] for each in found}) == 3


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_error_of_a_sample_concerns_it_alone(failing: int) -> None:
    llm, core = await submitted(samples_of(3)), Core()
    names = list(llm.states)

    def preprocess(core: Core, request: EngineCoreRequest) -> Any:
        if request.request_id == names[failing]:
            raise ValueError("not this one")
        return EngineCore.preprocess_add_request(core, request)

    hasher = core.request_block_hasher
    if failing == 2:  # that of the message, which vLLM's thread handles
        with pytest.raises(ValueError, match="not this one"):
            core.receive(llm.messages[0], preprocess_group(preprocess))
        arrived = [core.input_queue.get()[1][0].request_id for _ in range(2)]
        assert arrived == names[:2]
    else:
        arrived = core.receive(llm.messages[0], preprocess_group(preprocess))
        assert [each.request_id for each in arrived] == [n for n in names if n != names[failing]]
        assert core.failed == [names[failing]]
    assert core.request_block_hasher is hasher


async def test_request_without_copies_is_unchanged() -> None:
    core, plain = Core(), Core()
    request = request_of(SAMPLE, extra_args={"coppice_group": "g"})
    [found] = core.receive(request)
    assert fields(found) == fields(received_alone(plain, request))


async def test_nothing_is_submitted_to_a_dead_engine() -> None:
    llm: Any = Llm(errored=True)
    with pytest.raises(EngineDeadError):
        await add_copies(llm, request_of(SAMPLE), samples_of(2))
    assert not llm.states and not llm.messages


def test_samples_with_the_same_parameters_are_one_run() -> None:
    samples = samples_of(4)
    assert list(runs_of_copies(samples)) == [samples]
    streamed = [replace(each, on_tokens=lambda _: None) for each in samples]
    assert list(runs_of_copies(streamed)) == [streamed]
    assert list(runs_of_copies([])) == []


@pytest.mark.parametrize(
    "other",
    [
        {"prompt_token_ids": [1, 2]},
        {"sampling": Sampling(max_tokens=5)},
        {"sampling": Sampling(max_tokens=4, structured_outputs=StructuredOutputs(regex="a"))},
        {"seed": None},
        {"priority": 1},
        {"adapter": "a"},
        {"session_id": "s"},
        {"cache_salt": "c"},
        {"num_drawn_tokens": 1},
        {"multimodal_input": {"type": "multimodal"}},
        {"on_tokens": print},
        {"support": True},
        {"export": SLOT},
    ],
    ids=str,
)
def test_other_samples_begin_another_run(other: dict[str, Any]) -> None:
    first, second, third = samples_of(3)
    changed = replace(second, **other)
    assert list(runs_of_copies([first, changed, third])) == [[first], [changed], [third]]


def test_samples_that_transfer_kv_or_have_images_are_submitted_alone() -> None:
    load = KvLoad(chain="c", num_requests=1, exact_tokens=0, pieces=())
    for common in ({"load": load}, {"export": SLOT}, {"multimodal_input": {"type": "multimodal"}}):
        samples = [replace(each, **common) for each in samples_of(2)]
        assert list(runs_of_copies(samples)) == [[samples[0]], [samples[1]]]
