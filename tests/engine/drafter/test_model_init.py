"""What a drafter that is made from nothing looks like, and what it costs."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from engine.drafter.service.model_init import (
    SHARE,
    config_for,
    cost_of,
    num_multiplied,
    write_fresh,
)
from engine.weights.checkpoint import read_served
from tests.engine.seedling import MODEL

TARGET = json.loads((MODEL / "config.json").read_text())


def test_the_seedlings_drafter_costs_a_tenth_of_it_at_most(tmp_path: Path) -> None:
    target = num_multiplied(read_served(MODEL))
    config = config_for(TARGET, target, ranks=1)
    assert cost_of(config) <= SHARE * target
    assert config["vocab_size"] == TARGET["vocab_size"]
    write_fresh(tmp_path, config)
    assert num_multiplied(read_served(tmp_path)) == cost_of(config)


def test_an_embedding_that_is_only_looked_up_costs_nothing(tmp_path: Path) -> None:
    from tests.engine.random_models import random_tensors, write_model

    tied = read_served(write_model(tmp_path / "t", random_tensors(1, tied=True), tied=True))
    untied = read_served(write_model(tmp_path / "u", random_tensors(1, tied=False), tied=False))
    assert num_multiplied(tied) == num_multiplied(untied)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_heads_can_be_dealt_to_the_ranks(ranks: int) -> None:
    config = config_for(TARGET, 10**9, ranks=ranks)
    assert config["num_key_value_heads"] % ranks == 0
    assert config_for(TARGET, 1, ranks=ranks)["num_key_value_heads"] % ranks == 0


def test_hugging_face_loads_what_was_written(drafter_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(drafter_folder)
    assert model.config.tie_word_embeddings
    assert model.num_parameters() > 0
