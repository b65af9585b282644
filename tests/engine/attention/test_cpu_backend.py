"""Inside a live engine, shared-prefix attention is the function that stock attention is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.guard import FeatureState
from tests.engine.attention.shared_engine import SharedEngine, shared_engine
from tests.engine.greedy import assert_greedy
from tests.engine.live import Answer
from tests.engine.models import VOCAB, random_tensors, write_model
from tests.engine.sampled import SPECULATION

# vLLM's imports and its draft methods warn of their own affairs.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SYSTEM = [*range(30, 30 + 70)]
GROUPS = [[*SYSTEM, *range(200 + 40 * g, 200 + 40 * g + 35 * (g % 3))] for g in range(4)]
ALONE = [9, 8, 7]
GROUP_SIZE = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = random_tensors(7, tied=False, sharpness=4.0)
    return write_model(tmp_path_factory.mktemp("models") / "sharp", tensors, tied=False)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """Prompts are computed in chunks, and the cache does not hold all samples at once."""
    cache = tmp_path_factory.mktemp("cache")
    with shared_engine(
        model, cache, max_num_batched_tokens=128, kv_cache_memory_bytes=45 * 2**15
    ) as engine:
        yield engine


def sample(
    engine: SharedEngine, num_tokens: int, **sampling: Any
) -> list[tuple[list[int], Answer]]:
    """Groups that come one after the other: later prompts are computed beside earlier samples."""
    live = engine.live
    prompts = [prompt for prompt in GROUPS for _ in range(GROUP_SIZE)]
    names = []
    for number, prompt in enumerate([*prompts, ALONE]):
        seed = {"seed": number} if sampling.get("temperature") else {}
        names.append(live.submit(prompt, max_tokens=num_tokens, **(sampling | seed)))
        if number % GROUP_SIZE == 1:
            live.step(2)
    return list(zip([*prompts, ALONE], live.finish(*names), strict=True))


def assert_all_greedy(reference: Any, answers: list[tuple[list[int], Answer]]) -> None:
    for prompt, answer in answers:
        assert_greedy(reference, prompt, answer.token_ids)


def test_chunked_prompts_preempted_samples_and_several_levels_stay_greedy(
    engine: SharedEngine, reference: Any
) -> None:
    kinds = Kinds(engine)
    with engine.mode("always") as counted:
        answers = sample(engine, 60)
    assert_all_greedy(reference, answers)
    assert counted["steps_grouped"] > 60
    assert counted["rows_grouped"] > 4 * counted["steps_grouped"]
    assert kinds.mixed and kinds.levels and kinds.preempted


class Kinds:
    """Which kinds of step were grouped, seen on their way through the builder."""

    def __init__(self, engine: SharedEngine) -> None:
        self.mixed = self.levels = self.preempted = self.drafted = False
        share, scheduler = engine.builder.sharer.share, engine.live.core.scheduler

        def seen(table: Any, lens: Any, starts: Any) -> Any:
            sharing = share(table, lens, starts)
            if sharing is not None:
                self.mixed |= sharing.num_rows < len(lens)
                self.levels |= len(sharing.plan.node_rows) > len(set(sharing.plan.node_rows))
                self.drafted |= sharing.num_tokens > sharing.num_rows
                self.preempted |= any(r.num_preemptions for r in scheduler.running)
            return sharing

        engine.builder.sharer.share = seen


def test_a_sample_has_the_logprobs_that_it_has_without(engine: SharedEngine) -> None:
    with engine.mode("off") as stock_counted:
        stock = sample(engine, 12)
    with engine.mode("always") as counted:
        shared = sample(engine, 12)
    assert stock_counted["steps_grouped"] == 0 < counted["steps_grouped"]
    for (_, ours), (_, theirs) in zip(shared, stock, strict=True):
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
        same = next((i for i, (one, other) in pairs if one != other), len(ours.token_ids))
        assert ours.logprobs[:same] == pytest.approx(theirs.logprobs[:same], abs=1e-4)


def test_a_failure_leaves_the_step_to_stock_attention(engine: SharedEngine, reference: Any) -> None:
    from engine.attention.cpu_backend import FEATURE

    share = engine.builder.sharer.share

    def failing(*_: Any) -> None:
        raise RuntimeError("no plan today")

    engine.builder.sharer.share = failing
    try:
        with engine.mode("always") as counted:
            answers = sample(engine, 8)
    finally:
        engine.builder.sharer.share = share
        state, FEATURE.state = FEATURE.state, FeatureState(on=True, num_failures=0, reason=None)
    assert_all_greedy(reference, answers)
    assert state.reason == "RuntimeError: no plan today"
    assert counted["steps_grouped"] == 0 < counted["steps_skipped"]["failed"]


def test_drafted_tokens_are_verified_in_groups(model: Path, reference: Any, tmp_path: Path) -> None:
    with shared_engine(model, tmp_path, **SPECULATION) as engine:
        kinds = Kinds(engine)
        with engine.mode("always") as counted:
            answers = sample(engine, 60)
    assert_all_greedy(reference, answers)
    assert counted["steps_grouped"] > 0
    assert kinds.drafted


def test_in_bfloat16_the_distributions_stay_close(model: Path, tmp_path: Path) -> None:
    with shared_engine(
        model, tmp_path, mode="auto", dtype="bfloat16", max_logprobs=VOCAB
    ) as engine:
        with engine.mode("off"):
            stock = distributions(engine)
        with engine.mode("always") as counted:
            shared = distributions(engine)
        with engine.mode("auto") as decided:
            sample(engine, 8)
    assert counted["steps_grouped"] > 0
    divergences = [
        float((theirs.exp() * (theirs - ours)).sum())
        for one, other in zip(stock, shared, strict=True)
        for theirs, ours in zip(*common(one, other), strict=True)
    ]
    assert len(divergences) > 200
    assert 0 < sum(divergences) / len(divergences) < 1e-3
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert decided["steps_grouped"] + decided["steps_skipped"]["not_worth_it"] > 0


Drawn = tuple[list[int], torch.Tensor]


def distributions(engine: SharedEngine) -> list[Drawn]:
    """Tokens drawn with a seed for each sample, and what each was drawn from."""
    prompts = [prompt for prompt in GROUPS for _ in range(GROUP_SIZE)]
    drawn = []
    for output in engine.live.generate(
        prompts, max_tokens=24, temperature=1.0, logprobs=VOCAB, ignore_eos=True, detokenize=False
    ):
        [sample] = output.outputs
        rows = [[entry[token].logprob for token in range(VOCAB)] for entry in sample.logprobs]
        drawn.append((list(sample.token_ids), torch.tensor(rows, dtype=torch.float64)))
    return drawn


def common(one: Drawn, other: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to the first token that differs: it was still drawn after the same tokens."""
    pairs = enumerate(zip(one[0], other[0], strict=True))
    length = next((i + 1 for i, (mine, yours) in pairs if mine != yours), len(one[0]))
    return one[1][:length], other[1][:length]
