"""Sampling controls of samples whose prompts are spliced from loaded KV.

In a model of one layer, spliced prompts are exact. So samples with a seed equal those of the same
prompt that is prefilled, if the controls see the whole prompt and nothing else.
"""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.requests.request_params import sampling_params
from engine.sampling import request_hooks
from engine.types.kv import KvLoad
from engine.types.samples import SampleRequest, Sampling, StructuredOutputs
from service.kv.spans.prompt_template import joined
from service.kv.spans.spliced_prompt import prefill_lengths
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import EXPORTING, kv_format, save_model
from tests.engine.kv_transfer.load_chains import Chains, spans
from tests.engine.kv_transfer.test_loads import PROMPTS, A, B, C
from tests.engine.seedling import MODEL
from tests.engine.stepped_engine import Answer, LiveEngine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PARTS = PROMPTS["three holes"]
RECOMPUTED = 8
IDS = itertools.count()
CONTROLS: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": tuple(range(15, 60))},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(0, 480, 3))},
    "grammar": {"structured_outputs": StructuredOutputs(regex="([0-9][a-f]){10}")},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    "bad_words": {"bad_words": ("1", "2", "an")},
    "logit_bias": {"logit_bias": {20: 6.0, 21: -4.0}},
    "min_p": {"min_p": 0.4},
    "top_k": {"top_k": 6, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    request_hooks.install()
    folder = tmp_path_factory.mktemp("models") / "v7"
    save_model(folder, "qwen3", num_kv_heads=2, num_hidden_layers=1)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    engine = LiveEngine(folder, max_model_len=448, skip_tokenizer_init=False, **EXPORTING)
    for answer in engine.rpc("coppice_prepare_kv_export"):
        assert answer["not_movable"] is None
    yield engine
    engine.close()


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_of_spliced_prompts_are_those_of_prefilled_ones(
    engine: LiveEngine, tmp_path: Path, control: str
) -> None:
    reset(engine)
    chains = Chains(engine, TestArena(tmp_path / "arena", kv_format(2, num_layers=1)))
    chains.export(A, B, C)
    load = chains.load(PARTS, chain=control, recompute_tokens=RECOMPUTED, n=2)
    for end in prefill_lengths(spans(PARTS, recompute_tokens=RECOMPUTED)):
        engine.submit(joined(PARTS)[:end], load=load, max_tokens=1)
    spliced = sampled(engine, control, load)
    assert all(answer.num_cached_tokens > 0 for answer in spliced)
    reset(engine)
    for ours, theirs in zip(spliced, sampled(engine, control, None), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert ours.support == theirs.support
        assert (ours.finish, ours.stop_reason) == (theirs.finish, theirs.stop_reason)


def reset(engine: LiveEngine) -> None:
    with engine.paused():
        engine.core.coppice_reset_prefix_cache()


def sampled(engine: LiveEngine, control: str, load: KvLoad | None) -> list[Answer]:
    fields: dict[str, Any] = {"max_tokens": 20, "temperature": 0.8, **CONTROLS[control]}
    names = []
    for seed in (3, 4):
        request = SampleRequest(
            id="",
            prompt_token_ids=joined(PARTS),
            sampling=Sampling(**fields),
            seed=seed,
            support=True,
            load=load,
        )
        names.append(f"loaded-{next(IDS)}")
        prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
        engine._llm.llm_engine.add_request(names[-1], prompt, sampling_params(request, 448))
    return engine.finish(*names)
