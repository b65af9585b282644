"""KV versions of requests that find blocks which a sample filled across updates of the weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.harness.kv_teacher_forcing import Teacher, Turn
from tests.engine.model_families import save_family
from tests.engine.stepped_engine import Answer, LiveEngine, live_engine
from tests.engine.test_kept_kv import BLOCK, kv

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 4e-5
"""Of docs/concepts/weights-version.md."""
PROMPT = [(7 * i) % 250 for i in range(100)]
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {f"v{n}": save_family(directory / f"v{n}", "dense", seed=n) for n in (7, 8, 9)}


@pytest.fixture(scope="module")
def teacher(models: dict[str, Path]) -> Teacher:
    return Teacher(models)


@pytest.fixture(scope="module")
def shared_engine(models: dict[str, Path]) -> Iterator[LiveEngine]:
    with live_engine(models["v7"]) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: LiveEngine, models: dict[str, Path]) -> LiveEngine:
    """Serves v7, with an empty prefix cache."""
    shared_engine.swap(models["v7"])
    return shared_engine


def first_turn(
    engine: LiveEngine, models: dict[str, Path], *updates: tuple[int, str]
) -> tuple[list[int], list[int]]:
    """Tokens of a chain's first request, and the ends of its KV at the updates.

    Each update is that many steps after the previous one.
    """
    running = engine.submit(PROMPT, max_tokens=NUM_TOKENS, chain="a")
    for num_steps, version in updates:
        engine.step(num_steps)
        engine.swap(models[version], keep_kv=True)
    [answer] = engine.finish(running)
    ends = [span.end for span in answer.kv_versions[:-1]]
    assert all(end % BLOCK for end in ends), "every update is inside a block"
    return PROMPT + answer.token_ids, ends


def off(teacher: Teacher, version: str, prompt: Sequence[int], answer: Answer) -> float:
    """Greatest difference of logprobs from teacher forcing over the stated KV, in nats."""
    turn = Turn(
        version=version,
        token_ids=[*prompt, *answer.token_ids],
        logprobs=answer.logprobs,
        kv_versions=answer.kv_versions,
    )
    return max(map(abs, teacher.force(turn).log_ratio_stated))


def test_next_turn_states_the_kv_of_a_mixed_block_by_position(
    engine: LiveEngine, models: dict[str, Path], teacher: Teacher
) -> None:
    tokens, [end] = first_turn(engine, models, (10, "v8"))
    prompt = [*tokens, 17, 18]
    [answer] = engine.ask(prompt, max_tokens=9, chain="a")
    assert answer.num_cached_tokens == (len(tokens) - 1) // BLOCK * BLOCK
    assert answer.kv_versions == kv(("v7", 0, end), ("v8", end, len(prompt) + 8))
    assert off(teacher, "v8", prompt, answer) <= TOLERANCE


def test_block_filled_across_two_updates_has_three_versions(
    engine: LiveEngine, models: dict[str, Path], teacher: Teacher
) -> None:
    tokens, [first, second] = first_turn(engine, models, (10, "v8"), (5, "v9"))
    assert first // BLOCK == second // BLOCK
    prompt = [*tokens, 17, 18]
    [answer] = engine.ask(prompt, max_tokens=9, chain="a")
    spans = (("v7", 0, first), ("v8", first, second), ("v9", second, len(prompt) + 8))
    assert answer.kv_versions == kv(*spans)
    assert off(teacher, "v9", prompt, answer) <= TOLERANCE


def test_later_turns_and_updates_leave_the_versions_of_a_mixed_block(
    engine: LiveEngine, models: dict[str, Path], teacher: Teacher
) -> None:
    """Like the calls of a session, of which two run across an update."""
    tokens, [first] = first_turn(engine, models, (10, "v8"))
    prompt = [*tokens, 17, 18]
    running = engine.submit(prompt, max_tokens=NUM_TOKENS, chain="a")
    engine.step(5)
    engine.swap(models["v9"], keep_kv=True)
    [answer] = engine.finish(running)
    second = answer.kv_versions[1].end
    assert answer.kv_versions[0].end == first and second % BLOCK
    tokens, first_prompt = [*prompt, *answer.token_ids], prompt
    engine.swap(models["v7"], keep_kv=True)
    prompt = [*tokens, 19]
    [answer] = engine.ask(prompt, max_tokens=9, chain="a")
    found = answer.num_cached_tokens
    assert found > second > len(first_prompt)
    spans = (("v7", 0, first), ("v8", first, second), ("v9", second, found))
    assert answer.kv_versions == kv(*spans, ("v7", found, len(prompt) + 8))
    assert off(teacher, "v7", prompt, answer) <= TOLERANCE


def test_forks_state_the_kv_of_mixed_blocks_by_position(
    engine: LiveEngine, models: dict[str, Path], teacher: Teacher
) -> None:
    """Like the paths of a tree: they fork before, inside and behind the mixed block."""
    tokens, [end] = first_turn(engine, models, (10, "v8"))
    mixed = end // BLOCK * BLOCK
    forks = [[*tokens[:at], 17] for at in (mixed, end + 3, mixed + BLOCK, len(tokens) - 1)]
    names = [engine.submit(fork, max_tokens=40, chain="a") for fork in forks]
    for fork, answer in zip(forks, engine.finish(*names), strict=True):
        first = min(answer.num_cached_tokens, end)
        assert answer.kv_versions == kv(("v7", 0, first), ("v8", first, len(fork) + 39))
        assert off(teacher, "v8", fork, answer) <= TOLERANCE


def test_mixed_block_is_as_old_as_its_oldest_position(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    tokens, [end] = first_turn(engine, models, (10, "v8"))
    [answer] = engine.ask(tokens, max_tokens=1, chain="a", max_lag=0)
    assert answer.kv_versions == kv(("v8", 0, len(tokens)))


@pytest.mark.parametrize("family", ["sliding_window", "alternating_windows"])
def test_hit_of_windowed_layers_states_the_kv_in_front_of_the_window(
    tmp_path: Path, family: str
) -> None:
    """The first block is not found, but the KV of those that are found depends on it."""
    models = {f"v{n}": save_family(tmp_path / f"v{n}", family, seed=n) for n in (7, 8)}
    end = BLOCK + 8
    with live_engine(models["v7"], max_num_batched_tokens=end, max_num_seqs=2) as engine:
        running = engine.submit(PROMPT, max_tokens=1, chain="a")
        engine.step()
        engine.swap(models["v8"], keep_kv=True)
        engine.finish(running)
        [answer] = engine.ask(PROMPT, max_tokens=9, chain="a")
    assert answer.num_cached_tokens == 3 * BLOCK
    assert answer.kv_versions == kv(("v7", 0, end), ("v8", end, len(PROMPT) + 8))
    assert off(Teacher(models), "v8", PROMPT, answer) <= TOLERANCE
