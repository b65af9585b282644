"""vLLM's scheduler has the same state after every call with and without the short paths."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engine.kv_lifetime.core import version_hooks
from engine.kv_lifetime.core.engine_core_methods import coppice_start_session_kv_retention
from engine.kv_lifetime.core.engine_core_methods import counted as retained
from engine.kv_lifetime.keep_option import KEEP_KV_ARG, KeepOption
from engine.launch.engine_core_methods import coppice_reset_prefix_cache
from engine.patches import same_blocks
from tests.engine.seedling import MODEL
from tests.sample_sizes import num_examples

pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK, NUM_BLOCKS, MAX_TOKENS, MAX_ROWS, CHUNK = 8, 26, 80, 8, 24
SHAPE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 1,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=2 * BLOCK)


@pytest.fixture(scope="module", autouse=True)
def hooks() -> None:
    version_hooks.install()
    init_none_hash(sha256)


def kv_cache_config(*specs: KVCacheSpec, num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([str(index)], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def without_short_paths(manager: Any) -> None:
    """Remove what an earlier test of this process may have made vLLM's class attach."""
    for name in ("allocate_slots", "cache_blocks"):
        vars(manager).pop(name, None)
    vars(manager.empty_kv_cache_blocks).pop("get_block_ids", None)


def counting(call: Callable[..., Any]) -> tuple[Callable[..., Any], list[None]]:
    """The callable, and a list that each call makes longer."""
    calls: list[None] = []

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(None)
        return call(*args, **named)

    return counted, calls


class Core:
    """An EngineCore's scheduler, with steps in flight and a model that the test plays."""

    def __init__(self, kind: type[Scheduler], num_drafts: int, *, short: bool) -> None:
        config = EngineArgs(
            str(MODEL),
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=CHUNK,
            max_model_len=MAX_TOKENS,
            scheduling_policy="priority",
            skip_tokenizer_init=True,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        config.scheduler_config.watermark = 0.05
        config.scheduler_config.async_scheduling = kind is AsyncScheduler
        self.scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=kv_cache_config(FULL),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = kind is AsyncScheduler
        self.scheduler.num_spec_tokens = self.scheduler.num_lookahead_tokens = num_drafts
        self.model_executor = SimpleNamespace(reset_encoder_cache=lambda: None)
        self.in_flight: deque[tuple[Any, list[str]]] = deque()
        coppice_start_session_kv_retention(self, 0.2, 3600.0)
        self.manager = self.scheduler.kv_cache_manager
        without_short_paths(self.manager)
        if short:
            same_blocks.attach(self.manager)
        coordinator = self.manager.coordinator
        coordinator.allocate_new_blocks, self.allocated = counting(coordinator.allocate_new_blocks)
        coordinator.cache_blocks, self.cached = counting(coordinator.cache_blocks)

    def is_scheduler_paused(self) -> bool:
        return True

    def state(self) -> dict[str, Any]:
        return {
            "cache": cache_state(self.manager),
            "retained": retained(self),
            "running": [each.request_id for each in self.scheduler.running],
            "requests": {
                name: (each.status, each.num_computed_tokens, list(each.all_token_ids))
                for name, each in self.scheduler.requests.items()
            },
        }


def ids(blocks: Sequence[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def cache_state(manager: Any) -> dict[str, Any]:
    """Everything that an allocation may change."""
    [group], pool = manager.coordinator.single_type_managers, manager.block_pool
    kept = pool.coppice_kept_blocks
    return {
        "tables": {name: ids(blocks) for name, blocks in group.req_to_blocks.items()},
        "num_cached": dict(group.num_cached_block),
        "new_blocks": list(group.new_block_ids),
        "blocks": [(each.ref_cnt, each.block_hash) for each in pool.blocks],
        "free": ids(pool.free_block_queue.get_all_free_blocks()),
        "hashes": {
            key: sorted(found) if isinstance(found, dict) else [found.block_id]
            for key, found in pool.cached_block_hash_to_block._cache.items()
        },
        "kept": (kept.snapshot(), dict(kept._blocks), dict(kept.reports)),
    }


def scheduled(output: Any) -> dict[str, Any]:
    """Blocks and tokens of a SchedulerOutput."""
    cached = output.scheduled_cached_reqs
    return {
        "tokens": output.num_scheduled_tokens,
        "drafts": output.scheduled_spec_decode_tokens,
        "new": [(each.req_id, each.block_ids) for each in output.scheduled_new_reqs],
        "cached": (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens),
        "preempted": output.preempted_req_ids,
        "zeroed": output.new_block_ids_to_zero,
    }


class Pair:
    """Two EngineCores that get the same calls: vLLM's own methods, and the short paths."""

    def __init__(self, kind: type[Scheduler], num_drafts: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.cores = [Core(kind, num_drafts, short=short) for short in (False, True)]
        self.max_in_flight = 2 if kind is AsyncScheduler else 1
        self.num_drafts = num_drafts
        self.names = (f"r{number}" for number in itertools.count())
        self.texts: list[list[int]] = [[1] * 30]
        self.seen: Counter[str] = Counter()

    def each(self, call: Callable[[Core], Any]) -> Any:
        """Result of a call of both cores, which is the same and leaves the same state."""
        expected, found = (call(core) for core in self.cores)
        assert found == expected
        assert self.cores[1].state() == self.cores[0].state()
        return expected

    def add(self) -> None:
        """Add a request that continues the text of an earlier one."""
        text = self.random.choice(self.texts)[: self.random.randrange(1, 40)]
        prompt = text + self.random.choices(range(5), k=self.random.randrange(1, 12))
        args = {KEEP_KV_ARG: KeepOption(max_lag=self.random.choice([None, 0, 1]))}
        chain = self.random.choice([None, "a", "b"])
        name, num_tokens = next(self.names), self.random.randrange(1, 30)
        fields: dict[str, Any] = {
            "arrival_time": float(name[1:]),
            "priority": self.random.randrange(2),
            "cache_salt": chain,
            "session_id": self.random.choice([None, "s"]),
        }

        def submit(core: Core) -> None:
            params = SamplingParams(max_tokens=num_tokens, extra_args=args if chain else None)
            hasher = get_request_block_hasher(BLOCK, sha256)
            request = Request(name, prompt, params, None, **fields, block_hasher=hasher)
            core.scheduler.add_request(request)

        self.each(submit)

    def step(self) -> None:
        self.each(self._schedule)
        if len(self.cores[0].in_flight) == self.max_in_flight:
            self.finish_step()

    def _schedule(self, core: Core) -> Any:
        output = core.scheduler.schedule()
        requests = core.scheduler.requests
        samples = [n for n in output.num_scheduled_tokens if not requests[n].is_prefill_chunk]
        core.in_flight.append((output, samples))
        self.seen["preempted"] += len(output.preempted_req_ids or ())
        self.seen["hits"] += sum(each.num_computed_tokens > 0 for each in output.scheduled_new_reqs)
        return scheduled(output)

    def finish_step(self) -> None:
        """Play the model's answer to the oldest step in flight: of its drafts a part is right."""
        output, samples = self.cores[0].in_flight[0]
        sampled: dict[str, list[int]] = {}
        for name in output.num_scheduled_tokens:
            drafts = output.scheduled_spec_decode_tokens.get(name, ())
            accepted = self.random.randrange(len(drafts) + 1)
            self.seen["rejected"] += len(drafts) - accepted
            tokens = self.random.choices(range(5), k=accepted + 1)
            sampled[name] = tokens if name in samples else []
        drafted = DraftTokenIds(
            samples, [self.random.choices(range(5), k=self.num_drafts) for _ in samples]
        )

        def update(core: Core) -> Any:
            output, _ = core.in_flight.popleft()
            names = {name: row for row, name in enumerate(sampled)}
            tokens = deepcopy(list(sampled.values()))
            answer = ModelRunnerOutput(list(names), names, tokens)
            outputs = core.scheduler.update_from_output(output, answer)
            if self.num_drafts and self.max_in_flight == 1:
                core.scheduler.update_draft_token_ids(deepcopy(drafted))
            each = itertools.chain.from_iterable(one.outputs for one in outputs.values())
            return [(one.request_id, one.new_token_ids, one.finish_reason) for one in each]

        for name, tokens, _ in self.each(update):
            request = self.cores[0].scheduler.requests.get(name)
            if request is not None and tokens:
                self.texts = [*self.texts[-10:], list(request.all_token_ids)]

    def abort(self) -> None:
        if names := sorted(self.cores[0].scheduler.requests):
            name = self.random.choice(names)
            aborted = RequestStatus.FINISHED_ABORTED
            self.each(lambda core: core.scheduler.finish_requests(name, aborted) and None)
            self.seen["aborted"] += 1

    def update_weights(self) -> None:
        while self.cores[0].in_flight:
            self.finish_step()
        keep = self.random.random() < 0.6
        self.seen["updates"] += 1

        def reset(core: Any) -> Any:
            reset = coppice_reset_prefix_cache(core, keep)
            version_hooks.kept_blocks(core).set_version(str(self.seen["updates"]))
            return reset

        self.each(reset)

    def act(self) -> None:
        calls = [self.step, self.add, self.abort, self.update_weights]
        self.random.choices(calls, [30, 12, 0.5, 0.5])[0]()


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_random_traces_leave_the_same_state(kind: type[Scheduler], num_drafts: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(num_examples(8)):
        pair = Pair(kind, num_drafts, seed)
        for _ in range(600):
            pair.act()
        theirs, ours = pair.cores
        assert 0 < len(ours.allocated) < 0.8 * len(theirs.allocated)
        assert 0 < len(ours.cached) < 0.8 * len(theirs.cached)
        seen += pair.seen
    expected = {"preempted", "rejected", "hits", "aborted", "updates"}
    assert seen.keys() >= (expected if num_drafts else expected - {"rejected"})


ARGUMENTS: dict[str, Any] = {
    "delay_cache_blocks": True,
    "full_sequence_must_fit": True,
    "reserved_blocks": 6,
    "has_scheduled_reqs": False,
}
STATUSES = (RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.PREEMPTED)


def made_manager(*specs: KVCacheSpec, num_blocks: int = NUM_BLOCKS, **options: Any) -> Any:
    manager = KVCacheManager(
        kv_cache_config(*specs, num_blocks=num_blocks),
        max_model_len=MAX_TOKENS,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        **options,
    )
    without_short_paths(manager)
    return manager


def allocation(manager: Any, request: Request, *args: Any, **named: Any) -> Any:
    """Ids of the allocated blocks, None if they are missing, or vLLM's error."""
    try:
        blocks = manager.allocate_slots(request, *args, **named)
    except ValueError as error:
        return str(error)
    return None if blocks is None else (blocks.get_block_ids(),)


def test_calls_with_any_arguments_leave_the_same_state() -> None:
    """Calls that the scheduler does not make, or only for requests that do not run."""
    chance, results = random.Random(1), set[str]()
    for _ in range(num_examples(400)):
        managers = [made_manager(FULL, num_blocks=12, watermark=0.6) for _ in range(2)]
        same_blocks.attach(managers[1])
        prompts = [[1] * chance.randrange(1, 75) for _ in range(3)]
        hasher = get_request_block_hasher(BLOCK, sha256)
        params = SamplingParams(max_tokens=9)
        requests = [
            [Request(str(n), p, params, None, block_hasher=hasher) for n, p in enumerate(prompts)]
            for _ in managers
        ]
        for _ in range(20):
            number, num_new = chance.randrange(3), chance.randrange(6)
            status = chance.choice(STATUSES)
            names = chance.sample(list(ARGUMENTS), chance.randrange(3))
            named = {name: ARGUMENTS[name] for name in names}
            if chance.random() < 0.8:
                named["num_lookahead_tokens"] = chance.choice([0, 1, 5])
            args = chance.choice([(), (), (), (3, None)])
            found = []
            for manager, each in zip(managers, requests, strict=True):
                each[number].status = status
                found.append(allocation(manager, each[number], num_new, *args, **named))
                if isinstance(found[-1], tuple):
                    each[number].num_computed_tokens += num_new
            assert found[0] == found[1]
            assert cache_state(managers[0]) == cache_state(managers[1])
            results.add(type(found[0]).__name__)
    assert results == {"tuple", "str", "NoneType"}


@pytest.mark.parametrize(
    "specs",
    [
        [SLIDING],
        [FULL, SLIDING],
        [MambaSpec(block_size=BLOCK, shapes=((1, 1),), dtypes=(torch.float32,))],
        [RSWASpec(**SHAPE, rswa_window=BLOCK)],
    ],
)
def test_other_caches_are_left_to_vllm(specs: list[KVCacheSpec]) -> None:
    manager = made_manager(*specs)
    same_blocks.attach(manager)
    assert not vars(manager).keys() & {"allocate_slots", "cache_blocks"}


def test_cache_without_prefix_caching_is_left_to_vllm() -> None:
    manager = made_manager(FULL, enable_caching=False)
    same_blocks.attach(manager)
    assert not vars(manager).keys() & {"allocate_slots", "cache_blocks"}


def test_latent_attention_has_the_short_paths() -> None:
    manager = made_manager(MLAAttentionSpec(**SHAPE))
    same_blocks.attach(manager)
    assert vars(manager).keys() >= {"allocate_slots", "cache_blocks"}


@pytest.mark.parametrize("allow_none", [False, True])
def test_empty_blocks_have_the_ids_of_vllms(allow_none: bool) -> None:
    manager = made_manager(FULL, SLIDING)
    same_blocks.attach(manager)
    expected = KVCacheBlocks(((), ())).get_block_ids(allow_none)
    empty = manager.empty_kv_cache_blocks
    assert empty.get_block_ids(allow_none) == expected
    assert empty.get_block_ids(allow_none=allow_none) == expected
    assert empty.get_block_ids(group_ids=[1]) == ([],)
