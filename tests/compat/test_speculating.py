"""The same clients on a speculating server, where vLLM supports neither min_p nor logit_bias."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from kernels.draft_index.compiled_store import is_built
from tests.compat.programs import install, run_client_program
from tests.invariants.service_process import home, service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not is_built(), reason="the draft store was not built"),
]

WANTED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 8, "n": 4},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8}},
    "/generate": {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8}},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    install("clients")
    settings = ("--engine.dtype", "float32", "--speculation.mode", "siblings")
    with home() as place, service(place, *settings) as served:
        yield served.url


def request_of(path: str, **fields: Any) -> dict[str, Any]:
    """A request with the fields where that API has them."""
    body = WANTED[path]
    if "sampling_params" not in body:
        return {**body, **fields}
    if path == "/generate":  # SGLang's name
        fields = {{"min_tokens": "min_new_tokens"}.get(name, name): fields[name] for name in fields}
    return {**body, "sampling_params": {**body["sampling_params"], **fields}}


@pytest.mark.parametrize("path", WANTED)
def test_controls_that_exclude_drafts_are_served(url: str, path: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        for fields in ({"min_p": 0.0, "logit_bias": {}}, {"min_p": 0.1}, {"min_tokens": 2}):
            assert http.post(path, json=request_of(path, **fields)).status_code == 200


def test_renderers_and_openai_client_work_unchanged(url: str) -> None:
    answer = run_client_program(["clients"], "renderers_generate", url)
    first, second = answer["first"], answer["second"]
    for turn in (first, second):
        assert len(turn["completion_ids"]) == len(turn["completion_logprobs"]) > 0
    assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as speaker:
        model = speaker.models.list().data[0].id
        drawn = speaker.completions.create(model=model, prompt=[5, 6, 7], n=8, max_tokens=32)
    assert len(drawn.choices) == 8
    assert all(choice.finish_reason in ("stop", "length") for choice in drawn.choices)
