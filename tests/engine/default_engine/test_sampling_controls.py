"""Sampling controls of the real engine: distributions, stop strings, and resumed responses."""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import SamplingRefused
from engine.types.chat import ChatRequest
from engine.types.samples import Completion, SampleRequest, Sampling, StructuredOutputs
from engine.vllm_engine import VllmEngine
from tests.engine.controlled_sampling import controlled_logprobs
from tests.engine.seedling import reference
from tests.engine.speculation.distributions import chi_square, p_value
from tests.sample_sizes import TIMES

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

_IDS = itertools.count()
PROMPT = "Compute 12+34.\n"
NUM_SAMPLES = int(5000 * TIMES)
BAD_WORDS = ("46", "=4", "answer")
CONTROLS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.2},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": {20: 9.0, 21: -2.0, 30: 8.0}},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(15, 40))},
    "bad_words": {"bad_words": BAD_WORDS},
    "min_tokens": {"min_tokens": 10},
    "regex": {"structured_outputs": StructuredOutputs(regex="[a-c]{2,4}[0-9]{2,6}x?")},
    "all": {
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {20: 3.0},
        "bad_words": BAD_WORDS,
        "min_tokens": 4,
        "structured_outputs": StructuredOutputs(regex="[0-9a-f]{3,9}"),
    },
}
MIN_P_VALUE = 1e-4 / (2 * len(CONTROLS))
"""After Bonferroni: a correct implementation fails any test of both tokens once in 10,000 runs."""
every_control = pytest.mark.parametrize("control", CONTROLS)


async def run(
    engine: VllmEngine, prompt: list[int], *, n: int = 1, num_prior_tokens: int = 0, **given: Any
) -> list[Completion]:
    wanted: dict[str, Any] = {"max_tokens": 14, **given}
    samples = [
        SampleRequest(
            id=f"c{next(_IDS)}",
            prompt_token_ids=prompt,
            sampling=Sampling(**wanted),
            group="g",
            num_prior_tokens=num_prior_tokens,
        )
        for _ in range(n)
    ]
    return list(await asyncio.gather(*await engine.submit(samples)))


def expected(
    engine: VllmEngine, prompt: list[int], response: list[int], **given: Any
) -> torch.Tensor:
    texts = [
        engine.decode([token], skip_special_tokens=False) for token in range(engine.info.vocab_size)
    ]
    stop_ids = engine.info.eos_token_ids
    texts = ["" if token in stop_ids else text for token, text in enumerate(texts)]
    words = [engine.encode_text(f"{s}{word}") for word in BAD_WORDS for s in ("", " ")]
    return controlled_logprobs(
        reference(),
        texts,
        prompt,
        response,
        Sampling(**{"max_tokens": 14, **given}),
        stop_ids=stop_ids,
        bad_words=words if "bad_words" in given else (),
    )


@every_control
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_logprobs_are_those_of_the_controlled_distribution(
    engine: VllmEngine, control: str, temperature: float
) -> None:
    given = {**CONTROLS[control], "temperature": temperature}
    prompt = engine.encode_text(PROMPT)
    for sample in await run(engine, prompt, n=1 if temperature == 0 else 4, **given):
        wanted = expected(engine, prompt, sample.token_ids, **given)
        chosen = wanted[range(len(sample.token_ids)), sample.token_ids]
        assert sample.logprobs == pytest.approx(chosen.tolist(), abs=1e-3)
        if temperature == 0:
            assert wanted.argmax(-1).tolist() == sample.token_ids


@every_control
async def test_tokens_follow_the_controlled_distribution(engine: VllmEngine, control: str) -> None:
    """The second token of samples that share a prompt, given the most frequent first one."""
    given = {**CONTROLS[control], "temperature": 2.0}
    prompt = engine.encode_text(PROMPT)
    samples = await run(
        engine, prompt, n=NUM_SAMPLES, **{**given, "max_tokens": 2, "ignore_eos": True}
    )
    first = np.bincount([s.token_ids[0] for s in samples], minlength=engine.info.vocab_size)
    top = int(first.argmax())
    seconds = [s.token_ids[1] for s in samples if s.token_ids[0] == top and len(s.token_ids) > 1]
    second = np.bincount(seconds, minlength=engine.info.vocab_size)
    wanted = expected(engine, prompt, [top, seconds[0]], **given).exp().numpy()
    for counts, distribution in zip((first, second), wanted, strict=True):
        assert not counts[distribution == 0].any()
        statistic, freedom = chi_square(counts, distribution)
        assert freedom == 0 or p_value((statistic, freedom)) > MIN_P_VALUE


@every_control
async def test_resumed_response_goes_on_as_if_it_had_not_been_interrupted(
    engine: VllmEngine, control: str
) -> None:
    given = {**CONTROLS[control], "temperature": 0.0, "ignore_eos": control != "regex"}
    prompt = engine.encode_text(PROMPT)
    [whole] = await run(engine, prompt, **given)
    for number in range(1, len(whole.token_ids), 3):
        sampling = Sampling(**{"max_tokens": 14, **given}).after(number, 14 - number)
        resumed = SampleRequest(
            id=f"c{next(_IDS)}",
            prompt_token_ids=prompt + whole.token_ids[:number],
            sampling=sampling,
            num_prior_tokens=number,
        )
        [rest] = await asyncio.gather(*await engine.submit([resumed]))
        assert rest.token_ids == whole.token_ids[number:]
        assert rest.logprobs == pytest.approx(whole.logprobs[number:], abs=1e-3)
        assert rest.finish == whole.finish


async def test_resumed_response_that_violates_its_grammar_fails_alone(engine: VllmEngine) -> None:
    prompt = engine.encode_text(PROMPT)
    given: dict[str, Any] = {"structured_outputs": StructuredOutputs(regex="[a-c]+")}
    violating = run(engine, prompt + engine.encode_text("12"), num_prior_tokens=2, **given)
    other = run(engine, prompt, **given)
    [failed], [completed] = await asyncio.gather(violating, other)
    assert failed.finish == "error"
    assert completed.finish in ("stop", "length")


@pytest.mark.parametrize("include", [False, True])
async def test_sample_ends_with_the_token_that_completes_the_stop_string(
    engine: VllmEngine, include: bool
) -> None:
    prompt = engine.encode_text(PROMPT)
    [whole] = await run(engine, prompt, temperature=0.0)
    text = engine.decode(whole.token_ids)
    stop = text[4:7]
    [sample] = await run(
        engine, prompt, temperature=0.0, stop=("zz", stop), include_stop_str_in_output=include
    )
    number = len(sample.token_ids)
    assert sample.token_ids == whole.token_ids[:number]
    assert stop in engine.decode(sample.token_ids)
    assert stop not in engine.decode(sample.token_ids[:-1])
    assert (sample.finish, sample.stop_reason) == ("stop", stop)
    assert len(sample.logprobs) == number == sample.versions[-1].end


async def test_stop_string_may_begin_in_the_earlier_tokens(engine: VllmEngine) -> None:
    prompt = engine.encode_text(PROMPT)
    [whole] = await run(engine, prompt, temperature=0.0)
    text = engine.decode(whole.token_ids)
    for number in range(2, 6):
        start = len(engine.decode(whole.token_ids[:number]))
        stop = text[start - 1 : start + 1]
        [sample] = await run(
            engine,
            prompt + whole.token_ids[:number],
            num_prior_tokens=number,
            temperature=0.0,
            stop=(stop, text[start - 2 : start]),
        )
        assert (sample.stop_reason, len(sample.token_ids)) == (stop, 1)


async def test_stop_token_is_the_stop_reason(engine: VllmEngine) -> None:
    prompt = engine.encode_text(PROMPT)
    [whole] = await run(engine, prompt, temperature=0.0)
    token = whole.token_ids[3]
    [sample] = await run(engine, prompt, temperature=0.0, stop_token_ids=(token,))
    assert (sample.finish, sample.stop_reason, sample.token_ids[-1]) == ("stop", token, token)


async def test_prompt_of_a_chat_ends_with_the_message_to_continue(engine: VllmEngine) -> None:
    messages = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "answer: "}]
    request = ChatRequest(
        messages=messages, add_generation_prompt=False, continue_final_message=True
    )
    token_ids = engine.encode_chat(request)
    assert engine.decode(token_ids, skip_special_tokens=False).endswith("answer: ")
    assert engine.encode_chat(replace(request, truncate_prompt_tokens=3)) == token_ids[-3:]
    long = [{"role": "user", "content": "1+2 " * 2000}]
    cut = engine.encode_chat(ChatRequest(messages=long, truncate_prompt_tokens=5))
    assert len(cut) == 5
    first = replace(request, truncate_prompt_tokens=3, truncation_side="right")
    assert engine.encode_chat(first) == token_ids[:3]


async def test_engine_refuses_what_it_cannot_apply(engine: VllmEngine) -> None:
    size = engine.info.vocab_size
    outputs = StructuredOutputs(regex="[a-c]+")
    good = Sampling(max_tokens=4, bad_words=BAD_WORDS, structured_outputs=outputs)
    await engine.check_sampling(good)
    for bad in (
        Sampling(max_tokens=4, logit_bias={size: 1.0}),
        Sampling(max_tokens=4, structured_outputs=StructuredOutputs(regex="(a")),
    ):
        with pytest.raises(SamplingRefused):
            await engine.check_sampling(bad)
