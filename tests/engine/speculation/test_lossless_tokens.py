"""Drafts leave the distribution of the next token unchanged: it is the model's own.

Samples are compared with the distribution computed from the weights, and with samples drawn without
drafts. The model is memoryless, so every token of a long sample is an independent draw.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.speculation.custom_class_proposer import Proposer
from tests.engine.speculation.distributions import (
    VOCAB,
    Floats,
    Setting,
    chi_square,
    next_token_logits,
    p_value,
    two_sample_chi_square,
    write_small_model,
)
from tests.engine.speculation.drafting_engine import Recording, drafting_engine, in_group
from tests.engine.speculation.sample_sizes import (
    CONTEXTS,
    DETECTABLE,
    MIN_P_VALUE,
    NUM_DRAWS,
    ROWS,
    SIBLINGS,
    all_settings,
    truncated_or_exhaustive,
)
from tests.engine.stepped_engine import LiveEngine

Ints = NDArray[np.int64]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("distribution") / "model", memoryless=True)


@pytest.fixture(scope="module")
def drafting(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveEngine, Proposer]]:
    with drafting_engine(
        model,
        tmp_path_factory.mktemp("kept"),
        max_num_seqs=ROWS,
        max_num_batched_tokens=1024,
        max_model_len=1024,
        kv_cache_memory_bytes=2**27,
    ) as drafting:
        yield drafting


@pytest.mark.engine
@truncated_or_exhaustive
def test_next_tokens_follow_the_distribution_of_the_model(
    drafting: tuple[LiveEngine, Proposer], model: Path, setting: Setting
) -> None:
    engine, proposer = drafting
    assert proposer.speculator is not None
    proposer.speculator = record = Recording(proposer.speculator)
    drafted = transitions(engine, setting, drafts=True)
    proposer.speculator = record.speculator
    plain = transitions(engine, setting, drafts=False)
    laws = setting.distribution(next_token_logits(model, list(range(VOCAB))))
    assert record.tried.sum() > NUM_DRAWS / 2
    assert p_value(acceptance_chi_square(record.tried, record.hits, laws)) > MIN_P_VALUE
    for token in np.argsort(-drafted.sum(axis=1))[:CONTEXTS].tolist():
        assert drafted[token].sum() > NUM_DRAWS / VOCAB
        assert p_value(chi_square(drafted[token], laws[token])) > MIN_P_VALUE
        assert p_value(two_sample_chi_square(drafted[token], plain[token])) > MIN_P_VALUE


@all_settings
@pytest.mark.parametrize("rule", ["right", "accept_always", "resample_from_all"])
def test_broken_acceptance_rule_would_be_detected(rule: str, setting: Setting) -> None:
    """Broken only as often as gives the total variation DETECTABLE in each of five contexts."""
    chance = np.random.default_rng(11)
    laws = setting.distribution(chance.normal(scale=2.0, size=(CONTEXTS, VOCAB)))
    tried, hits = np.zeros((2, CONTEXTS, VOCAB), np.int64)
    for context, distribution in enumerate(laws):
        for draft in chance.choice(VOCAB, size=8, p=distribution).tolist():
            drawn = drawn_with(rule, distribution, draft, NUM_DRAWS // CONTEXTS // 8, chance)
            tried[context, draft] += drawn.sum()
            hits[context, draft] += drawn[draft]
    assert (p_value(acceptance_chi_square(tried, hits, laws)) < MIN_P_VALUE) == (rule != "right")


def transitions(engine: LiveEngine, setting: Setting, *, drafts: bool) -> Ints:
    """[token, next token]: how often the one followed the other."""
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    length = 800
    for number in range(-(-NUM_DRAWS // (ROWS * (length - 1)))):
        names = [
            engine.submit(
                [number % VOCAB, row // SIBLINGS],
                max_tokens=length,
                logprobs=None,
                **setting.sampling(),
                **in_group(f"{number}.{row // SIBLINGS}", drafts=drafts),
            )
            for row in range(ROWS)
        ]
        for answer in engine.finish(*names):
            tokens = np.array(answer.token_ids)
            np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    return counts


def acceptance_chi_square(tried: Ints, hits: Ints, laws: Floats) -> tuple[float, int]:
    """Chi-square of the acceptance rate of drafts against the probability of their tokens.

    The most sensitive test of the acceptance rule. All arrays are [token before, token drafted].
    """
    off = (hits - tried * laws).sum()
    return float(off**2 / (tried * laws * (1 - laws)).sum()), 1


def drawn_with(
    rule: str, distribution: Floats, draft: int, number: int, chance: np.random.Generator
) -> Ints:
    """Samples under an acceptance rule of one draft, broken as often as gives DETECTABLE."""
    right = chance.choice(VOCAB, size=number, p=distribution)
    off = {
        "right": 0.0,
        "accept_always": 1 - distribution[draft],
        "resample_from_all": distribution[draft] * (1 - distribution[draft]),
    }[rule]
    broken = chance.random(number) < (DETECTABLE / off if off else 0.0)
    accepted = (chance.random(number) < distribution[draft]) | (rule == "accept_always")
    wrong = np.where(accepted, draft, chance.choice(VOCAB, size=number, p=distribution))
    return np.bincount(np.where(broken, wrong, right), minlength=VOCAB)
