"""KV that chains keep across weights updates, on the real engine, compared with running samples."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import LoadFailed
from engine.runtime.heartbeat import Heartbeat
from engine.types.samples import KvVersionSpan
from engine.weights.checkpoint import read_base_checkpoint
from engine.weights.updates import ServedWeights
from tests.engine.random_models import make_models
from tests.engine.stepped_engine import FAULTY, LiveEngine, live_engine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCK = 32
NUM_STEPS = 29
PROMPT = [(7 * i) % 500 for i in range(4 * BLOCK + 1 - NUM_STEPS)]
"""With the tokens of NUM_STEPS steps it is one token longer than four blocks."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = make_models(tmp_path_factory.mktemp("models"), tied=True)
    return made | {"v9": Path(shutil.copytree(made["v8"], made["v8"].with_name("v9")))}


@pytest.fixture(scope="module")
def shared_engine(models: dict[str, Path]) -> Iterator[LiveEngine]:
    with live_engine(models["v7"], extension=FAULTY) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: LiveEngine, models: dict[str, Path]) -> LiveEngine:
    """Serves v7, with an empty prefix cache."""
    shared_engine.swap(models["v7"])
    return shared_engine


def kv(*spans: tuple[str, int, int], first_token: int = 0) -> tuple[KvVersionSpan, ...]:
    return tuple(
        KvVersionSpan(version=version, start=start, end=end, first_token=first_token)
        for version, start, end in spans
    )


def num_dropped(engine: LiveEngine) -> int:
    """Tokens that were dropped because they were older than the request's `max_lag`."""
    counted = engine.core.coppice_ping()["features"]["kept_kv"]["core"]
    return int(counted["num_dropped_tokens"].get("lag", 0))


def first_turn(engine: LiveEngine, chain: str = "a", max_lag: int | None = None) -> list[int]:
    """Tokens of a chain after its first request: its cached blocks are four."""
    [answer] = engine.ask(PROMPT, max_tokens=NUM_STEPS, chain=chain, max_lag=max_lag)
    return PROMPT + answer.token_ids


def test_chain_continues_as_a_sample_that_kept_its_kv(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    running = engine.submit(PROMPT, max_tokens=80)
    tokens = first_turn(engine)  # in the same steps
    engine.swap(models["v8"], keep_kv=True)
    [expected] = engine.finish(running)
    [continued] = engine.ask(tokens, max_tokens=80 - NUM_STEPS, chain="a")
    assert expected.versions[0].end == NUM_STEPS
    assert continued.token_ids == expected.token_ids[NUM_STEPS:]
    assert continued.logprobs == pytest.approx(expected.logprobs[NUM_STEPS:], abs=1e-4)
    assert continued.num_cached_tokens == 4 * BLOCK
    num_positions = len(PROMPT) + 80 - 1
    spans = kv(("v7", 0, 4 * BLOCK), ("v8", 4 * BLOCK, num_positions))
    assert continued.kv_versions == expected.kv_versions == spans


def test_kept_kv_differs_from_that_of_the_new_weights(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    tokens = first_turn(engine)
    engine.swap(models["v8"], keep_kv=True)
    [continued] = engine.ask(tokens, max_tokens=20, chain="a")
    [exact] = engine.ask(tokens, max_tokens=20)
    assert continued.logprobs != pytest.approx(exact.logprobs, abs=1e-3)
    assert exact.kv_versions == kv(("v8", 0, len(tokens) + 19))


def test_kept_kv_is_hit_by_its_chain_alone(engine: LiveEngine, models: dict[str, Path]) -> None:
    tokens = first_turn(engine)
    first_turn(engine, chain="b")
    engine.ask(tokens, max_tokens=1)
    reset = engine.swap(models["v8"], keep_kv=True)
    assert reset["num_kept_tokens"] == 8 * BLOCK
    others = [dict[str, str](), {"salt": "a."}, {"chain": "c"}]
    for other in others:
        [answer] = engine.finish(engine.submit(tokens, max_tokens=1, **other))  # type: ignore[arg-type]
        assert answer.num_cached_tokens == 0
        assert answer.kv_versions == kv(("v8", 0, len(tokens)))
    [own] = engine.ask(tokens, max_tokens=1, chain="a")
    assert own.num_cached_tokens == 4 * BLOCK


def test_other_resets_drop_kept_kv(engine: LiveEngine, models: dict[str, Path]) -> None:
    tokens = first_turn(engine)
    engine.swap(models["v8"], keep_kv=True)
    assert engine.swap(models["v9"])["num_kept_tokens"] == 0
    [answer] = engine.ask(tokens, max_tokens=2, chain="a")
    assert answer.num_cached_tokens == 0
    assert answer.kv_versions == kv(("v9", 0, len(tokens) + 1))
    pool = engine.core.coppice_check_pool()
    assert pool["num_references"] == 0 and pool["num_free_blocks"] == pool["num_blocks"]


class CoreProcesses:
    """The engine in this process, as `ServedWeights` calls one in other processes."""

    def __init__(self, engine: LiveEngine) -> None:
        self._engine = engine

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        return self._engine.rpc(method, *args)

    async def call_cores(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._engine.core, method)(*args)]


def failed_update(engine: LiveEngine, served: ServedWeights, path: Path) -> None:
    """Update that fails after some tensors, so that the previous weights are restored."""
    engine.rpc("coppice_fail_next", 9)
    with engine.paused(), pytest.raises(LoadFailed):
        asyncio.run(served.update(path, path.name, keep_kv=True))


def served_weights(engine: LiveEngine, path: Path) -> ServedWeights:
    processes: Any = CoreProcesses(engine)
    return ServedWeights(
        processes, Heartbeat(timeouts={}), path, read_base_checkpoint(path), version="v7"
    )


def test_failed_update_keeps_all_kv(engine: LiveEngine, models: dict[str, Path]) -> None:
    tokens = first_turn(engine, max_lag=0)
    [other] = engine.ask(tokens, max_tokens=20)
    running = engine.submit(PROMPT, max_tokens=NUM_STEPS, chain="b")
    engine.step(5)
    failed_update(engine, served_weights(engine, models["v7"]), models["v8"])
    [straddler] = engine.finish(running)
    assert straddler.kv_versions == kv(("v7", 0, len(tokens) - 1))
    for chain in ({"chain": "a", "max_lag": 0}, {"chain": "b", "max_lag": 0}, {}):
        [answer] = engine.finish(engine.submit(tokens, max_tokens=20, **chain))  # type: ignore[arg-type]
        assert answer.num_cached_tokens == 4 * BLOCK
        assert answer.kv_versions == kv(("v7", 0, len(tokens) + 19))
        assert answer.token_ids == other.token_ids
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_failed_update_drops_all_kv_if_other_files_were_restored(
    engine: LiveEngine, models: dict[str, Path], tmp_path: Path
) -> None:
    """The files of the served weights were replaced in place after they had been loaded."""
    path = Path(shutil.copytree(models["v7"], tmp_path / "v7"))
    engine.swap(path)
    served = served_weights(engine, path)
    tokens = first_turn(engine)
    shutil.copyfile(models["v8"] / "model.safetensors", path / "model.safetensors")
    failed_update(engine, served, models["v9"])
    [answer] = engine.ask(tokens, max_tokens=1, chain="a")
    assert answer.num_cached_tokens == 0


def test_blocks_that_exceed_the_lag_are_computed_again(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    first = first_turn(engine, max_lag=1)
    engine.swap(models["v8"], keep_kv=True)
    [second] = engine.ask(first, max_tokens=40, chain="a", max_lag=1)
    tokens = first + second.token_ids
    num_cached = (len(tokens) - 1) // BLOCK * BLOCK
    assert second.kv_versions == kv(("v7", 0, 4 * BLOCK), ("v8", 4 * BLOCK, len(tokens) - 1))
    before = engine.core.coppice_ping()["features"]["kept_kv"]["core"]["num_dropped_tokens"].get(
        "lag", 0
    )
    reset = engine.swap(models["v9"], keep_kv=True)
    dropped = num_dropped(engine) - before
    # The blocks of v8 were computed with those of v7 in context.
    assert (reset["num_kept_tokens"], dropped) == (0, num_cached)
    [exact] = engine.ask(tokens, max_tokens=2)
    for num_found in (0, num_cached):
        [later] = engine.ask(tokens, max_tokens=2, chain="a", max_lag=1)
        assert later.num_cached_tokens == num_found
        assert later.kv_versions == kv(("v9", 0, len(tokens) + 1))
        assert later.logprobs == pytest.approx(exact.logprobs, abs=1e-4)


def test_lag_counts_from_the_oldest_kv_in_context(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    """A sample caches blocks after an update that attended to the KV before it."""
    running = engine.submit(PROMPT, max_tokens=80, chain="a", max_lag=0)
    engine.step(10)
    engine.swap(models["v8"], keep_kv=True)
    [answer] = engine.finish(running)
    tokens = PROMPT + answer.token_ids
    [exact] = engine.ask(tokens, max_tokens=2)
    num_cached = (len(tokens) - 1) // BLOCK * BLOCK
    for num_found in (0, num_cached):
        engine.ask(PROMPT, max_tokens=1, chain="a", max_lag=0)
        [later] = engine.ask(tokens, max_tokens=2, chain="a", max_lag=0)
        assert later.num_cached_tokens >= num_found
        assert later.kv_versions == kv(("v8", 0, len(tokens) + 1))
        assert later.logprobs == pytest.approx(exact.logprobs, abs=1e-4)


def test_smaller_lag_of_a_later_request_holds(engine: LiveEngine, models: dict[str, Path]) -> None:
    tokens = first_turn(engine)
    engine.swap(models["v8"], keep_kv=True)
    for _ in range(2):  # the second one finds the blocks of the first
        [answer] = engine.ask(tokens, max_tokens=2, chain="a", max_lag=0)
        assert answer.kv_versions == kv(("v8", 0, len(tokens) + 1))
    [answer] = engine.ask(tokens, max_tokens=2, chain="a")
    assert answer.kv_versions == kv(("v8", 0, len(tokens) + 1))  # the older blocks are gone


def test_block_behind_recomputed_blocks_is_computed_again(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    """A prompt of whole blocks does not read its last one, so only those before it are dropped."""
    tokens = first_turn(engine)
    engine.swap(models["v8"], keep_kv=True)
    engine.ask(tokens[: 4 * BLOCK], max_tokens=1, chain="a", max_lag=0)
    [exact] = engine.ask(tokens, max_tokens=2)
    [later] = engine.ask(tokens, max_tokens=2, chain="a")
    assert later.kv_versions == kv(("v8", 0, len(tokens) + 1))
    assert later.logprobs == pytest.approx(exact.logprobs, abs=1e-4)


def test_forks_of_a_chain_share_its_kept_blocks(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    """Like the paths of a tree, which end inside a block."""
    tokens = first_turn(engine)
    engine.swap(models["v8"], keep_kv=True)
    forks = [engine.submit([*tokens, 7 * i], max_tokens=3, chain="a") for i in range(3)]
    for answer in engine.finish(*forks):
        assert answer.kv_versions == kv(("v7", 0, 4 * BLOCK), ("v8", 4 * BLOCK, len(tokens) + 3))


def test_recomputed_sample_reports_the_kv_of_its_earlier_tokens(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    running = engine.submit(PROMPT, max_tokens=40)
    engine.step(10)
    engine.swap(models["v8"], recompute=True)
    [answer] = engine.finish(running)
    num = answer.versions[0].end
    first = kv(("v7", 0, len(PROMPT) + num - 1))
    assert answer.kv_versions == first + kv(("v8", 0, len(PROMPT) + 39), first_token=num)


def test_aborted_requests_leave_their_blocks_to_the_chain(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    tokens = first_turn(engine)
    engine.swap(models["v8"], keep_kv=True)
    engine.abort(engine.submit(tokens, max_tokens=50, chain="a"))
    running = engine.submit(tokens, max_tokens=50, chain="a")
    engine.step(5)
    engine.abort(running)
    engine.step()
    [answer] = engine.ask(tokens, max_tokens=2, chain="a")
    assert answer.kv_versions == kv(("v7", 0, 4 * BLOCK), ("v8", 4 * BLOCK, len(tokens) + 1))
    pool = engine.core.coppice_check_pool()
    assert (pool["num_references"], pool["num_requests"], pool["num_tables"]) == (0, 0, 0)


# The scenarios of sglang's test/registered/rl/test_weight_version_{spans,kv_isolation}.py.


def test_sample_over_two_updates_has_kv_of_three_versions(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    running = engine.submit(PROMPT, max_tokens=40)
    for version in ("v8", "v9"):
        engine.step(10)
        engine.swap(models[version])
    [answer] = engine.finish(running)
    ends = [len(PROMPT) + span.end - 1 for span in answer.versions]
    assert [span.version for span in answer.versions] == ["v7", "v8", "v9"]
    assert answer.kv_versions == kv(
        ("v7", 0, ends[0]), ("v8", ends[0], ends[1]), ("v9", ends[1], ends[2])
    )


def test_activation_of_the_same_version_splits_nothing(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    running = engine.submit(PROMPT, max_tokens=30)
    engine.step(10)
    engine.swap(models["v7"], keep_kv=True)
    [answer] = engine.finish(running)
    assert answer.kv_versions == kv(("v7", 0, len(PROMPT) + 29))


def test_new_requests_miss_the_prefixes_of_earlier_weights_and_hit_their_own(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    found = []
    for version in (None, "v8"):
        running = engine.submit(PROMPT, max_tokens=40)
        engine.step(5)
        if version is not None:
            engine.swap(models[version], keep_kv=True)
        for _ in range(2):
            [answer] = engine.ask([*PROMPT, 3], max_tokens=1)
            found.append((answer.num_cached_tokens, answer.kv_versions[0].version))
        engine.finish(running)
    num = len(PROMPT) // BLOCK * BLOCK
    assert found == [(num, "v7"), (num, "v7"), (0, "v8"), (num, "v8")]
