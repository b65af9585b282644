"""The seedling model: its task, tokenizer and weights, and the invariants of growing it."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.seedling import arithmetic, batches, enlarge, measure, tokenizer

ODD_TEXTS = [
    "",
    "Compute 17*24+5.\n",
    " two  spaces, a tab\t, a return\r\n and a zero \x00",
    "na\u00efve \u65e5\u672c\u8a9e \U0001f331 e\u0301",
    "answer:answer Computer <|en d|> 007",
]


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    words = AutoTokenizer.from_pretrained(enlarge.SEEDLING)
    assert isinstance(words, PreTrainedTokenizerFast)
    return words


@pytest.fixture(scope="module")
def seedling() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(enlarge.SEEDLING, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt_tokens(words: PreTrainedTokenizerFast) -> list[torch.Tensor]:
    problems = measure.held_out_problems(seed=3, num_prompts=3)
    return [torch.tensor([words.encode(problem.prompt)]) for problem in problems]


def greedy(model: Qwen3ForCausalLM, tokens: torch.Tensor, max_tokens: int = 48) -> list[int]:
    rows = model.generate(tokens, max_new_tokens=max_tokens, do_sample=False)
    response: list[int] = rows[0, tokens.shape[1] :].tolist()
    return response


def test_both_response_formats_give_the_correct_answer() -> None:
    rng = random.Random(1)
    for _ in range(300):
        problem = arithmetic.draw(rng, held_out=False)
        assert arithmetic.parse(problem.prompt) == problem
        for solve in (arithmetic.written_out, arithmetic.at_once):
            assert arithmetic.reward(problem.prompt, solve(problem)) == 1.0


def test_every_written_step_is_true() -> None:
    rng = random.Random(2)
    for _ in range(300):
        *steps, _last = arithmetic.written_out(arithmetic.draw(rng, held_out=False)).split("\n")
        for step in steps:
            values = {arithmetic.parse(f"{side}+0").answer for side in step.split("=")}
            assert len(values) == 1, step


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("17*24=340+68=408\n408+5=413\nanswer: 413", 1.0),
        ("answer: 413\n", 1.0),
        ("wrong steps, right end\nanswer: 413", 1.0),
        ("answer: 412", 0.0),
        ("answer: 0413", 0.0),
        ("answer: 413 or so", 0.0),
        ("answer: 413\nanswer: 412", 0.0),
        ("no answer: 413", 0.0),
        ("413", 0.0),
        ("", 0.0),
    ],
)
def test_only_a_last_line_with_the_exact_answer_is_rewarded(response: str, expected: float) -> None:
    assert arithmetic.reward("Compute 17*24+5.\n", response) == expected
    assert arithmetic.reward("17*24+5=", response) == expected


@pytest.mark.parametrize("prompt", ["", "Compute 47.", "1+1 or 2+2?"])
def test_prompt_without_exactly_one_problem_is_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="one arithmetic expression"):
        arithmetic.reward(prompt, "answer: 2")


def test_no_answer_is_negative_and_no_problem_is_too_long() -> None:
    rng = random.Random(4)
    problems = [arithmetic.draw(rng, held_out=True) for _ in range(100)]
    assert all(problem.answer >= 0 for problem in problems)
    assert all(len(problem.terms) <= arithmetic.MAX_TERMS for problem in problems)


def test_no_held_out_problem_is_in_the_training_stream(
    words: PreTrainedTokenizerFast,
) -> None:
    stream = batches.stream(words, seed=7, tokens_per_batch=4096, at_once_share=0.2)
    for _, batch in zip(range(20), stream, strict=False):
        for row in batch.tokens_BT.tolist():
            prompt = words.decode(row).partition("\n")[0]
            assert not arithmetic.parse(prompt).held_out
    assert all(p.held_out for p in measure.held_out_problems(seed=7, num_prompts=50))


def test_batch_labels_only_the_response_and_its_end(
    words: PreTrainedTokenizerFast,
) -> None:
    batch = next(batches.stream(words, seed=7, tokens_per_batch=2048, at_once_share=0.2))
    assert batch.tokens_BT.numel() <= 2048
    for tokens_T, labels_T in zip(batch.tokens_BT, batch.labels_BT, strict=True):
        asked = labels_T != batches.IGNORED
        assert torch.equal(tokens_T[asked], labels_T[asked])
        prompt, _, response = words.decode(tokens_T.tolist()).partition("\n")
        assert prompt.startswith("Compute ")
        assert words.decode(labels_T[asked].tolist()) == response.partition(tokenizer.PAD)[0]
        assert labels_T[asked][-1] == words.eos_token_id


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_text_survives_the_tokenizer(words: PreTrainedTokenizerFast, text: str) -> None:
    assert words.decode(words.encode(text)) == text


def test_every_byte_has_a_token(words: PreTrainedTokenizerFast) -> None:
    text = "".join(map(chr, range(0x2500)))
    assert words.decode(words.encode(text)) == text


def test_committed_tokenizer_is_the_one_the_code_builds(
    words: PreTrainedTokenizerFast,
) -> None:
    assert words.backend_tokenizer.to_str() == tokenizer.build().backend_tokenizer.to_str()


def test_user_message_equals_the_bare_prompt(
    words: PreTrainedTokenizerFast,
) -> None:
    messages = [{"role": "user", "content": "Compute 17*24+5."}]
    text = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "Compute 17*24+5.\n"


def test_seedling_ends_an_easy_response_by_itself(
    words: PreTrainedTokenizerFast, seedling: Qwen3ForCausalLM
) -> None:
    response = greedy(seedling, torch.tensor([words.encode("Compute 20*3.\n")]))
    assert response[-1] == words.eos_token_id
    assert words.decode(response).startswith("20*3=")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["25m", "100m"])
def test_growing_keeps_the_logits_in_float32(
    seedling: Qwen3ForCausalLM, prompt_tokens: list[torch.Tensor], size: str
) -> None:
    grown = enlarge.grow(seedling, enlarge.SHAPES[size])
    target = int(size.removesuffix("m")) * 1_000_000
    assert grown.num_parameters() == pytest.approx(target, rel=0.03)
    with torch.no_grad():
        for tokens in prompt_tokens:
            difference = grown(tokens).logits - seedling(tokens).logits
            assert difference.abs().max() < 1e-4


@pytest.mark.slow
def test_growing_keeps_every_greedy_choice_in_bfloat16(prompt_tokens: list[torch.Tensor]) -> None:
    seedling = Qwen3ForCausalLM.from_pretrained(enlarge.SEEDLING, dtype=torch.bfloat16)
    grown = enlarge.grow(seedling, enlarge.SHAPES["25m"])
    for tokens in prompt_tokens:
        # One pass over the seedling's own response: decoding step by step takes twenty seconds.
        whole = torch.cat([tokens, torch.tensor([greedy(seedling, tokens)])], dim=1)
        with torch.no_grad():
            chosen = [model(whole).logits[:, tokens.shape[1] - 1 :] for model in (seedling, grown)]
        ours = chosen[1].gather(-1, chosen[0].argmax(-1, keepdim=True)).squeeze(-1)
        best = chosen[1].amax(-1)  # a choice may differ where two are equal in bfloat16
        assert (best - ours <= best.abs() * 2**-6).all()


def test_untying_keeps_the_logits_and_separates_the_head(
    seedling: Qwen3ForCausalLM, prompt_tokens: list[torch.Tensor], tmp_path: Path
) -> None:
    enlarge.untie(seedling).save_pretrained(tmp_path)
    untied = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    with torch.no_grad():
        for tokens in prompt_tokens:
            assert (untied(tokens).logits - seedling(tokens).logits).abs().max() < 1e-5


def test_committed_model_is_small() -> None:
    num_bytes = sum(path.stat().st_size for path in enlarge.SEEDLING.iterdir())
    assert num_bytes <= 8 * 1024 * 1024


def test_measured_accuracy_leaves_room_for_reinforcement_learning() -> None:
    measured = json.loads((enlarge.SEEDLING / "measured.json").read_text())
    assert 0.3 <= measured["pass_at_1"] <= 0.6
    assert measured["p95_over_p50"] >= 3
    assert measured["truncated"] < 0.02
    assert measured["mixed_groups"] > 0.25
