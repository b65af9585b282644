"""With a drafter and without, tokens have one law: the tests of siblings' drafts, on its drafts.

The drafter is the model itself, greedy: it drafts what is likeliest, and is right as often as that
is drawn.
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
    chance_of,
    dependence,
    difference,
    misfit,
    next_token_logits,
    sequence_law,
    write_small_model,
)
from tests.engine.speculation.sample_sizes import CONTEXTS, LEAST, ROWS, in_both_settings
from tests.engine.speculation.test_lossless_sequences import (
    LENGTH,
    PROMPTS,
    counted,
    pairs_of_siblings,
    sequences,
)
from tests.engine.speculation.test_lossless_tokens import misjudged, transitions
from tests.engine.stepped_engine import LiveEngine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def without_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("law") / "model", without_memory=True)


@pytest.fixture(scope="module")
def attending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("law") / "model", without_memory=False)


@pytest.fixture(scope="module")
def engine_without_memory(without_memory: Path) -> Iterator[LiveEngine]:
    with drafter_engine(
        without_memory,
        without_memory,
        max_num_seqs=ROWS,
        max_num_batched_tokens=1024,
        max_model_len=1024,
        kv_cache_memory_bytes=2**28,
    ) as engine:
        yield engine


@pytest.mark.parametrize("setting", SETTINGS if sample_sizes.TIMES >= 1 else SETTINGS[1:])
def test_next_tokens_follow_the_models_law(
    engine_without_memory: LiveEngine, without_memory: Path, setting: Setting
) -> None:
    engine = engine_without_memory
    with Recording(engine) as record:
        drafted = transitions(engine, setting, drafts=True)
    laws = setting.law(next_token_logits(without_memory, list(range(VOCAB))))
    assert record.tried.sum() > sample_sizes.NUM_DRAWS / 2
    assert chance_of(misjudged(record.tried, record.hits, laws)) > LEAST
    for token in np.argsort(-drafted.sum(axis=1))[:CONTEXTS].tolist():
        assert drafted[token].sum() > sample_sizes.NUM_DRAWS / VOCAB
        assert chance_of(misfit(drafted[token], laws[token])) > LEAST


@pytest.fixture(scope="module")
def engine_attending(engine_without_memory: LiveEngine, attending: Path) -> Iterator[LiveEngine]:
    """After the other one: there is one in a process at a time."""
    engine_without_memory.close()
    with drafter_engine(
        attending, attending, max_num_seqs=ROWS, max_num_batched_tokens=1024
    ) as engine:
        yield engine


@in_both_settings
def test_sequences_follow_the_models_law_and_are_independent_of_their_siblings(
    engine_attending: LiveEngine, attending: Path, setting: Setting
) -> None:
    engine = engine_attending
    model = AutoModelForCausalLM.from_pretrained(attending).eval()
    before = num_accepted(engine)
    for prompt in PROMPTS[:2]:
        ours = sequences(engine, setting, prompt, drafts=True)
        theirs = sequences(engine, setting, prompt, drafts=False)
        law = sequence_law(model, prompt, setting, LENGTH, least=2e-5)
        seen = np.array([*map(Counter(ours).__getitem__, law), 0])
        seen[-1] = len(ours) - seen.sum()
        masses = np.array([*law.values(), 1 - sum(law.values())])
        assert chance_of(misfit(seen, masses)) > LEAST
        assert chance_of(difference(*counted(ours, theirs))) > LEAST
        assert chance_of(dependence(pairs_of_siblings(ours))) > LEAST
    assert num_accepted(engine) - before > len(PROMPTS[:2]) * len(ours) / 4


@in_both_settings
def test_logprobs_are_those_of_a_forward_over_the_whole_sample(
    engine_attending: LiveEngine, attending: Path, setting: Setting
) -> None:
    engine = engine_attending
    model = AutoModelForCausalLM.from_pretrained(attending).eval()
    before = num_accepted(engine)
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
    assert num_accepted(engine) > before
