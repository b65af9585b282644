"""A draft model leaves the distribution of tokens unchanged: the sibling-draft tests repeated.

The drafter is the model itself, greedy: it drafts the most likely token, and is accepted with that
token's probability.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.engine.drafter.drafter_engine import Recording, drafter_engine, num_accepted
from tests.engine.seedling import teacher_forced
from tests.engine.speculation import sample_sizes
from tests.engine.speculation.distributions import (
    SETTINGS,
    VOCAB,
    Setting,
    chi_square,
    independence_chi_square,
    next_token_logits,
    p_value,
    sequence_distribution,
    two_sample_chi_square,
    write_small_model,
)
from tests.engine.speculation.sample_sizes import CONTEXTS, MIN_P_VALUE, ROWS, all_settings
from tests.engine.speculation.test_lossless_sequences import (
    LENGTH,
    PROMPTS,
    counted,
    pairs_of_siblings,
    sequences,
)
from tests.engine.speculation.test_lossless_tokens import acceptance_chi_square, transitions
from tests.engine.stepped_engine import LiveEngine
from tests.sample_sizes import TIMES

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def memoryless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("distribution") / "model", memoryless=True)


@pytest.fixture(scope="module")
def attending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("distribution") / "model", memoryless=False)


@pytest.fixture(scope="module")
def engine_without_memory(memoryless: Path) -> Iterator[LiveEngine]:
    with drafter_engine(
        memoryless,
        memoryless,
        max_num_seqs=ROWS,
        max_num_batched_tokens=1024,
        max_model_len=1024,
        kv_cache_memory_bytes=2**28,
    ) as engine:
        yield engine


@pytest.mark.parametrize("setting", SETTINGS if TIMES >= 1 else SETTINGS[1:])
def test_next_tokens_follow_the_distribution_of_the_model(
    engine_without_memory: LiveEngine, memoryless: Path, setting: Setting
) -> None:
    engine = engine_without_memory
    with Recording(engine) as record:
        drafted = transitions(engine, setting, drafts=True)
    laws = setting.distribution(next_token_logits(memoryless, list(range(VOCAB))))
    assert record.tried.sum() > sample_sizes.NUM_DRAWS / 2
    assert p_value(acceptance_chi_square(record.tried, record.hits, laws)) > MIN_P_VALUE
    for token in np.argsort(-drafted.sum(axis=1))[:CONTEXTS].tolist():
        assert drafted[token].sum() > sample_sizes.NUM_DRAWS / VOCAB
        assert p_value(chi_square(drafted[token], laws[token])) > MIN_P_VALUE


@pytest.fixture(scope="module")
def engine_attending(engine_without_memory: LiveEngine, attending: Path) -> Iterator[LiveEngine]:
    """The second engine, created after the other is closed: a process holds one at a time."""
    engine_without_memory.close()
    with drafter_engine(
        attending, attending, max_num_seqs=ROWS, max_num_batched_tokens=1024
    ) as engine:
        yield engine


@all_settings
def test_sequences_follow_the_model_and_are_independent_of_siblings(
    engine_attending: LiveEngine, attending: Path, setting: Setting
) -> None:
    engine = engine_attending
    model = AutoModelForCausalLM.from_pretrained(attending).eval()
    before_schedule = num_accepted(engine)
    for prompt in PROMPTS[:2]:
        ours = sequences(engine, setting, prompt, drafts=True)
        theirs = sequences(engine, setting, prompt, drafts=False)
        distribution = sequence_distribution(model, prompt, setting, LENGTH, least=2e-5)
        seen = np.array([*map(Counter(ours).__getitem__, distribution), 0])
        seen[-1] = len(ours) - seen.sum()
        probs = np.array([*distribution.values(), 1 - sum(distribution.values())])
        assert p_value(chi_square(seen, probs)) > MIN_P_VALUE
        assert p_value(two_sample_chi_square(*counted(ours, theirs))) > MIN_P_VALUE
        assert p_value(independence_chi_square(pairs_of_siblings(ours))) > MIN_P_VALUE
    assert num_accepted(engine) - before_schedule > len(PROMPTS[:2]) * len(ours) / 4


@all_settings
def test_logprobs_equal_those_of_a_forward_over_the_whole_sample(
    engine_attending: LiveEngine, attending: Path, setting: Setting
) -> None:
    engine = engine_attending
    model = AutoModelForCausalLM.from_pretrained(attending).eval()
    before_schedule = num_accepted(engine)
    asked = [prompt for prompt in PROMPTS for _ in range(4)]
    for prompt, answer in zip(
        asked, engine.ask(*asked, max_tokens=60, **setting.sampling()), strict=True
    ):
        wanted = teacher_forced(
            model,
            prompt,
            answer.token_ids,
            temperature=setting.temperature,
            top_p=setting.top_p,
            top_k=setting.top_k,
        )
        assert answer.logprobs == pytest.approx(wanted, abs=1e-3)
    assert num_accepted(engine) > before_schedule
