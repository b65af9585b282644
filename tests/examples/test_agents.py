"""The task of agents that read each other's answers, and its training data for the seedling."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.seedling import arithmetic, batches, multi_agent_task, tokenizer, train_agents
from examples.seedling.enlarge import SEEDLING

SHAPE = multi_agent_task.Shape(num_peers=4, own=200, steps=3)


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    words = AutoTokenizer.from_pretrained(SEEDLING)
    assert isinstance(words, PreTrainedTokenizerFast)
    return words


def turns(
    number: int = 50, *, held_out: bool = False, num_later: int = 2
) -> list[multi_agent_task.Turn]:
    rng = random.Random(1)
    return [
        multi_agent_task.draw(rng, SHAPE, held_out=held_out, num_later=num_later)
        for _ in range(number)
    ]


def test_written_turns_are_correct_in_every_line() -> None:
    for turn in turns():
        for question in (turn.question, *turn.later):
            assert question.reward(question.written_out) == 1.0
            assert question.reward(f"answer: {question.sum.answer + 1}") == 0.0
        lines = [line for said in turn.said for line in said.splitlines()]
        for line in lines + turn.question.written_out.splitlines():
            sides = line.split("=")
            if len(sides) == 2 and not sides[0].isalpha():
                assert arithmetic.parse(f"{sides[0]}+0").answer == int(sides[1]), line


def test_every_summed_number_comes_from_one_peer() -> None:
    for turn in turns():
        for name, term in zip(turn.question.names, turn.question.sum.terms, strict=True):
            assert [f"\n{name}={term.left}\n" in said for said in turn.said].count(True) == 1
            assert f"{name}=" not in turn.own + turn.told + turn.ask


def test_other_answers_of_peers_change_the_correct_answer() -> None:
    """The rest of a prompt may be equal, since the peers' numbers are only in their answers."""
    turn = turns(1)[0]
    first, *others = turn.question.sum.terms
    more = arithmetic.Problem(terms=(replace(first, left=first.left + 1), *others))
    other = replace(turn.question, sum=more)
    assert str(other) == str(turn.question)
    assert other.reward(turn.question.written_out) == 0.0


def test_held_out_questions_are_never_in_the_training_data(words: PreTrainedTokenizerFast) -> None:
    for turn in turns(5, held_out=True, num_later=0):
        assert turn.question.sum.held_out
    batch = next(train_agents.stream(words, seed=3, num_steps=9))
    taught = [text for labels_T in batch.labels_BT for text in responses(words, labels_T)]
    assert len(taught) > 7
    assert not any(summed(text).held_out for text in taught)


def responses(words: PreTrainedTokenizerFast, labels_T: torch.Tensor) -> list[str]:
    """All texts of a row that have labels."""
    taught = words.decode(labels_T[labels_T != batches.IGNORED].tolist())
    assert isinstance(taught, str) and taught.endswith(tokenizer.END)
    return taught.split(tokenizer.END)[:-1]


def summed(response: str) -> arithmetic.Problem:
    asked, *lines = response.splitlines()
    values = dict(line.split("=") for line in lines if line[0].isalpha() and "=" in line)
    return arithmetic.parse("".join(values.get(symbol, symbol) for symbol in asked))


def test_same_seed_gives_the_same_turns_and_batches(words: PreTrainedTokenizerFast) -> None:
    assert turns(5) == turns(5)
    one, other = (next(train_agents.stream(words, seed=3, num_steps=9)) for _ in range(2))
    assert torch.equal(one.tokens_BT, other.tokens_BT)


def test_prompts_grow_to_a_thousand_tokens(words: PreTrainedTokenizerFast) -> None:
    rng = random.Random(1)
    for done, least, most in ((0.0, 80, 250), (1.0, 900, 1200)):
        shapes = [train_agents.shape_of(rng, train_agents.longest_at(done)) for _ in range(60)]
        prompts = [multi_agent_task.draw(rng, shape, held_out=False).prompt for shape in shapes]
        assert least < max(len(words.encode(prompt)) for prompt in prompts) < most


def test_agents_are_distinguishable_before_training(words: PreTrainedTokenizerFast) -> None:
    """In contrast, the seedling cannot distinguish two tokens that no problem contains."""
    model = Qwen3ForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32)
    before = distribution_similarity(model, words)
    torch.manual_seed(0)
    train_agents.reset_embeddings(model, words)
    assert distribution_similarity(model, words) < 0.3 < 0.99 < before


def distribution_similarity(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast) -> float:
    """The smallest cosine between two agents' embeddings."""
    rows = model.get_input_embeddings().weight.detach()[words.encode(multi_agent_task.AGENTS)]
    rows = rows / rows.norm(dim=1, keepdim=True)
    return float((rows @ rows.T).min())
