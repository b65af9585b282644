"""Routed experts next to drafts, preemptions, weights updates and resumed samples.

The reference is the model in Transformers, whose routers are recorded.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.requests.request_params import sampling_params
from engine.sampling import request_hooks
from engine.speculation.counters import COUNTERS
from engine.types.samples import SampleRequest, Sampling
from tests.engine.model_families import save_family
from tests.engine.speculation.drafting_engine import drafting_engine
from tests.engine.stepped_engine import Answer, LiveEngine

# Imports of vLLM and its draft methods emit unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PROMPT = [5 + i % 90 for i in range(75)]
IDS = itertools.count()
with_and_without_drafts = pytest.mark.parametrize("drafts", [False, True])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    seeds = {"v0": 5, "v1": 6}
    return {
        name: save_family(folder / name, "mixture_of_experts", seed=seed)
        for name, seed in seeds.items()
    }


@pytest.fixture(scope="module")
def engine(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveEngine]:
    """An engine whose KV cache cannot hold eight samples at once."""
    request_hooks.install()
    folder = tmp_path_factory.mktemp("drafts")
    options: dict[str, Any] = {"num_gpu_blocks_override": 22, "enable_return_routed_experts": True}
    with drafting_engine(models["v0"], folder, **options) as (engine, _):
        yield engine


def submit(engine: LiveEngine, prompt: list[int], *, drafts: bool, **given: Any) -> str:
    sampling: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.7}
    sampling |= given.pop("sampling", {})
    request = SampleRequest(
        id="",
        prompt_token_ids=prompt,
        group=f"{len(prompt)} {drafts}",
        speculation=drafts,
        sampling=Sampling(**sampling),
        **{"experts_from": 0, **given},
    )
    name = f"experts-{next(IDS)}"
    params = sampling_params(request, 512)
    engine._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    return name


def experts_of(models: dict[str, Path], answer: Answer, prompt: list[int]) -> np.ndarray[Any, Any]:
    """Experts of all tokens but the last: each under the weights that computed it, and their KV.

    The token before the first one of a version is the first that this version computes.
    """
    tokens, found, cache = [*prompt, *answer.token_ids[:-1]], [], None
    starts = [0, *(len(prompt) + span.start - 1 for span in answer.versions[1:]), len(tokens)]
    for span, start, end in zip(answer.versions, starts, starts[1:], strict=False):
        model = AutoModelForCausalLM.from_pretrained(models[span.version], dtype=torch.float32)
        seen: list[torch.Tensor] = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out[2]))
        with torch.no_grad():
            output = model(torch.tensor([tokens[start:end]]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(torch.stack(seen, 1))
    return np.sort(torch.cat(found).numpy(), -1)


def assert_experts(models: dict[str, Path], answer: Answer, prompt: list[int], start: int) -> None:
    wanted = experts_of(models, answer, prompt)[start:]
    np.testing.assert_array_equal(np.sort(answer.experts, -1), wanted)


@with_and_without_drafts
def test_experts_of_siblings_are_those_of_the_model(
    engine: LiveEngine, models: dict[str, Path], drafts: bool
) -> None:
    accepted = sum(COUNTERS.read()["accepted"].values())
    greedy = {"temperature": 0.0}
    names = [submit(engine, PROMPT, drafts=drafts, sampling=greedy) for _ in range(2)]
    names += [submit(engine, PROMPT, drafts=drafts) for _ in range(2)]
    names.append(submit(engine, PROMPT, drafts=drafts, experts_from=None))
    *answers, without = engine.finish(*names)
    assert without.experts is None
    for answer in answers:
        assert_experts(models, answer, PROMPT, 0)
    assert (sum(COUNTERS.read()["accepted"].values()) > accepted) == drafts


@with_and_without_drafts
@pytest.mark.parametrize("first", [0, 78])
@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 0.4}])
def test_resumed_sample_returns_the_experts_that_are_missing(
    engine: LiveEngine,
    models: dict[str, Path],
    drafts: bool,
    first: int,
    sampling: dict[str, Any],
) -> None:
    """Also if its earlier tokens are output tokens for vLLM, as penalties need them."""
    [begun] = engine.finish(submit(engine, PROMPT, drafts=drafts, sampling={"max_tokens": 5}))
    prompt = PROMPT + begun.token_ids
    [rest] = engine.finish(
        submit(
            engine,
            prompt,
            drafts=drafts,
            sampling=sampling,
            experts_from=first,
            num_prior_tokens=len(begun.token_ids),
        )
    )
    assert_experts(models, rest, prompt, first)


@with_and_without_drafts
def test_experts_are_those_of_the_weights_that_computed_each_token(
    engine: LiveEngine, models: dict[str, Path], drafts: bool
) -> None:
    names = [submit(engine, PROMPT, drafts=drafts) for _ in range(3)]
    engine.step(8)
    engine.swap(models["v1"])
    answers = engine.finish(*names)
    engine.swap(models["v0"])
    for answer in answers:
        assert [span.version for span in answer.versions] == ["v0", "v1"]
        assert_experts(models, answer, PROMPT, 0)


@with_and_without_drafts
def test_preempted_samples_have_one_row_per_token(
    engine: LiveEngine, models: dict[str, Path], drafts: bool
) -> None:
    prompts = [[*PROMPT[:50], 7 + n, 9] for n in range(8)]
    long = {"max_tokens": 80}
    names = [submit(engine, prompt, drafts=drafts, sampling=long) for prompt in prompts]
    preempted = set[str]()
    while engine.core.scheduler.has_unfinished_requests():
        engine.step()
        known = engine.core.scheduler.requests.values()
        preempted |= {request.request_id for request in known if request.num_preemptions}
    assert len(preempted) >= 2
    for prompt, answer in zip(prompts, engine.finish(*names), strict=True):
        assert_experts(models, answer, prompt, 0)
