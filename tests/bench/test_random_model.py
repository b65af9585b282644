"""Models of random weights: a tokenizer with text for every id, and equal layers."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM

from bench.harness.random_model import SEEDLING, SHAPES, write_model, write_tokenizer

VOCABULARY = SHAPES["qwen3-1.7b"]["vocab_size"]
LONGEST_WAIT = 4
"""Tokens that a stream holds back: of bytes that may begin a character, there are 128."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(file, VOCABULARY)
    return Tokenizer.from_file(str(file))


def shuffled_ids() -> list[int]:
    ids = list(range(VOCABULARY))
    random.Random(0).shuffle(ids)
    return ids


def longest_wait(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Largest number of tokens that an incremental decoder takes without returning text."""
    stream, waiting, longest = DecodeStream(skip_special_tokens=False), 0, 0
    for token in ids:
        waiting = 0 if stream.step(tokenizer, token) else waiting + 1
        longest = max(longest, waiting)
    return longest


def test_every_id_has_a_text_of_its_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCABULARY
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(VOCABULARY)]
    assert all(texts)
    assert len(set(texts)) == VOCABULARY - 127, "only the bytes beyond ASCII share their text"


def test_stream_of_random_ids_resolves_at_once(tokenizer: Tokenizer) -> None:
    assert longest_wait(tokenizer, shuffled_ids()) <= LONGEST_WAIT


def test_stream_of_ids_without_text_does_not_resolve() -> None:
    """The bundled tokenizer alone, which made each token more expensive than the one before."""
    small = Tokenizer.from_file(str(SEEDLING / "tokenizer.json"))
    assert longest_wait(small, [token for token in shuffled_ids()[:2000] if token >= 269]) > 1900


def test_text_is_encoded_as_by_the_bundled_tokenizer(tokenizer: Tokenizer) -> None:
    small = Tokenizer.from_file(str(SEEDLING / "tokenizer.json"))
    text = "Compute 12 + 3 \u00e9; abcd aaaa"
    assert tokenizer.encode(text).ids == small.encode(text).ids


def test_equal_layers_have_the_values_of_the_first(tmp_path: Path) -> None:
    drawn = load_file(write_model(tmp_path / "drawn", "tiny") / "model.safetensors")
    model = write_model(tmp_path / "equal", "tiny", equal_layers=True)
    equal = load_file(model / "model.safetensors")
    assert drawn.keys() == equal.keys()
    name = "model.layers.{}.mlp.up_proj.weight"
    assert equal[name.format(0)].equal(equal[name.format(1)])
    assert equal[name.format(0)].equal(drawn[name.format(0)])
    assert not drawn[name.format(0)].equal(drawn[name.format(1)])


def test_models_that_repeat_predict_the_token_before(tmp_path: Path) -> None:
    prompt = torch.tensor([[20, 300, 42, 7]])
    for shape in ("tiny", "tiny-drafter"):
        folder = write_model(tmp_path / shape, shape, equal_layers=True, repeats=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            assert model(prompt).logits.argmax(-1).equal(prompt)
