"""Drafts leave the distribution of whole samples unchanged and siblings independent.

The model has attention, so the probability of a sequence is the product of the conditional
probabilities of its tokens.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from engine.speculation.counters import COUNTERS
from tests.engine.seedling import teacher_forced
from tests.engine.speculation.distributions import (
    Setting,
    chi_square,
    independence_chi_square,
    p_value,
    sequence_distribution,
    two_sample_chi_square,
    write_small_model,
)
from tests.engine.speculation.drafting_engine import drafting_engine, in_group
from tests.engine.speculation.sample_sizes import (
    CONTEXTS,
    MIN_P_VALUE,
    NUM_SEQUENCES,
    ROWS,
    SIBLINGS,
    all_settings,
)
from tests.engine.stepped_engine import LiveEngine

pytestmark = pytest.mark.engine

Ints = NDArray[np.int64]
Sequences = list[tuple[int, ...]]

LENGTH = 4
PROMPTS = [[3 + number, 9, 2 * number, 17] for number in range(CONTEXTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("distribution") / "model", memoryless=False)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    kept = tmp_path_factory.mktemp("kept")
    with drafting_engine(folder, kept, max_num_seqs=ROWS, max_num_batched_tokens=1024) as (live, _):
        yield live


@all_settings
def test_sequences_follow_the_model_and_are_independent_of_siblings(
    engine: LiveEngine, folder: Path, setting: Setting
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    before = num_accepted()
    drafted = [sequences(engine, setting, prompt, drafts=True) for prompt in PROMPTS]
    assert num_accepted() - before > NUM_SEQUENCES / 4
    plain = [sequences(engine, setting, prompt, drafts=False) for prompt in PROMPTS]
    for prompt, ours, theirs in zip(PROMPTS, drafted, plain, strict=True):
        distribution = sequence_distribution(model, prompt, setting, LENGTH, least=2e-5)
        assert sum(distribution.values()) > 0.8
        seen = np.array([*map(Counter(ours).__getitem__, distribution), 0])
        seen[-1] = len(ours) - seen.sum()
        masses = np.array([*distribution.values(), 1 - sum(distribution.values())])
        assert p_value(chi_square(seen, masses)) > MIN_P_VALUE
        assert p_value(two_sample_chi_square(*counted(ours, theirs))) > MIN_P_VALUE
        for kind in (ours, theirs):
            assert p_value(independence_chi_square(pairs_of_siblings(kind))) > MIN_P_VALUE


@all_settings
def test_logprobs_equal_those_of_a_forward_over_the_whole_sample(
    engine: LiveEngine, folder: Path, setting: Setting
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    before = num_accepted()
    asked = [(prompt, f"long{prompt}") for prompt in PROMPTS for _ in range(SIBLINGS)]
    answers = engine.finish(
        *[
            engine.submit(prompt, max_tokens=60, **setting.sampling(), **in_group(name))
            for prompt, name in asked
        ]
    )
    assert num_accepted() > before
    for (prompt, _), answer in zip(asked, answers, strict=True):
        wanted = teacher_forced(
            model,
            prompt,
            answer.token_ids,
            temperature=setting.temperature,
            top_p=setting.top_p,
            top_k=setting.top_k,
        )
        assert answer.logprobs == pytest.approx(wanted, abs=1e-3)


def sequences(
    engine: LiveEngine, setting: Setting, prompt: Sequence[int], *, drafts: bool
) -> Sequences:
    """Responses of groups, siblings adjacent."""
    names = [
        engine.submit(
            prompt,
            max_tokens=LENGTH,
            logprobs=None,
            **setting.sampling(),
            **in_group(f"{prompt}{number // SIBLINGS}", drafts=drafts),
        )
        for number in range(NUM_SEQUENCES // CONTEXTS)
    ]
    return [tuple(answer.token_ids) for answer in engine.finish(*names)]


def counted(ours: Sequences, theirs: Sequences) -> tuple[Ints, Ints]:
    every = sorted({*ours, *theirs})
    one, other = Counter(ours), Counter(theirs)
    return np.array([one[s] for s in every]), np.array([other[s] for s in every])


def pairs_of_siblings(samples: Sequences) -> Ints:
    """[cell, cell] of adjacent samples of a group, by their last tokens; each is in one pair.

    A cell has as many tokens as it takes for each pair of cells to be expected five times, so that
    the chi-square approximation holds.
    """
    cells = _cells(samples)
    table = np.zeros((max(cells.values()) + 1,) * 2, np.int64)
    for one, other in zip(samples[::2], samples[1::2], strict=True):
        table[cells[one[-1]], cells[other[-1]]] += 1
    assert len(table) > 1
    return table


def _cells(samples: Sequences, num: int = 6) -> dict[int, int]:
    """The cell of each last token, the most common tokens first; the last cell has all others."""
    cells: dict[int, int] = {}
    in_cell, left, cell = 0, len(samples), 0
    for token, count in Counter(sample[-1] for sample in samples).most_common():
        cells[token] = cell
        in_cell, left = in_cell + count, left - count
        enough = min(in_cell, left) ** 2 >= 10 * len(samples)
        if enough and cell < num - 1:
            in_cell, cell = 0, cell + 1
    return cells


def num_accepted() -> int:
    return sum(COUNTERS.read()["accepted"].values())
