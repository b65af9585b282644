"""Size and compatibility of a freshly initialized drafter."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from engine.drafter.service.initial_model import (
    MAX_COST_SHARE,
    checkpoint_cost,
    config_cost,
    make_drafter_config,
    write_random_model,
)
from engine.weights.checkpoint import read_base_checkpoint
from tests.engine.seedling import MODEL

TARGET = json.loads((MODEL / "config.json").read_text())


def test_drafter_of_the_seedling_costs_at_most_a_tenth_of_it(tmp_path: Path) -> None:
    target = checkpoint_cost(read_base_checkpoint(MODEL))
    config = make_drafter_config(TARGET, target, ranks=1)
    assert config_cost(config) <= MAX_COST_SHARE * target
    assert config["vocab_size"] == TARGET["vocab_size"]
    write_random_model(tmp_path, config)
    assert checkpoint_cost(read_base_checkpoint(tmp_path)) == config_cost(config)


def test_embedding_lookup_costs_nothing(tmp_path: Path) -> None:
    from tests.engine.random_models import random_tensors, write_model

    tied = read_base_checkpoint(
        write_model(tmp_path / "t", random_tensors(1, tied=True), tied=True)
    )
    untied = read_base_checkpoint(
        write_model(tmp_path / "u", random_tensors(1, tied=False), tied=False)
    )
    assert checkpoint_cost(tied) == checkpoint_cost(untied)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_heads_are_divisible_among_ranks(ranks: int) -> None:
    config = make_drafter_config(TARGET, 10**9, ranks=ranks)
    assert config["num_key_value_heads"] % ranks == 0
    assert make_drafter_config(TARGET, 1, ranks=ranks)["num_key_value_heads"] % ranks == 0


def test_hugging_face_loads_the_written_drafter(drafter_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(drafter_folder)
    assert model.config.tie_word_embeddings
    assert model.num_parameters() > 0
