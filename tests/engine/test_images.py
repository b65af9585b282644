"""Images in prompts, on a real engine with a small vision model, against vLLM's own `LLM.chat`."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from engine.vllm_engine import VllmEngine
from tests.engine.plain_vllm import ENVIRONMENT, ROOT
from tests.engine.seedling import BLOCK, settings
from tests.engine.vision_model import (
    data_url,
    image_part,
    noise,
    save_vision_model,
)
from tests.serving import Served, serving

# Imports of vLLM emit unrelated warnings.
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

TEXT = "Compute 1+2. " * 12
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
FIRST, SECOND = data_url(noise(1)), data_url(noise(2))
Parts = list[dict[str, Any]]
PROMPTS: Mapping[str, Parts] = {
    "one image": [image_part(FIRST), {"type": "text", "text": TEXT}],
    "another image": [image_part(SECOND), {"type": "text", "text": TEXT}],
    "two images": [
        image_part(FIRST),
        {"type": "text", "text": TEXT},
        image_part(SECOND),
        {"type": "text", "text": "3"},
    ],
}
MAX_LOGPROB_ERROR = 1e-4


def messages(prompt: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": PROMPTS[prompt]}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of a model."""
    root = tmp_path_factory.mktemp("vision")
    return {f"v{seed}": save_vision_model(root / f"v{seed}", seed=seed) for seed in (5, 6)}


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Prompt, tokens and logprobs of plain vLLM in another process, by version and prompt."""
    return {
        version: dict(zip(PROMPTS, plain_samples(at), strict=True))
        for version, at in models.items()
    }


def plain_samples(model: Path) -> list[Any]:
    answer = subprocess.run(
        [sys.executable, "-m", "tests.engine.plain_vision", str(model)],
        input=json.dumps([messages(prompt) for prompt in PROMPTS]),
        env=os.environ | ENVIRONMENT,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    found: list[Any] = json.loads(answer.splitlines()[-1])
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    engine = VllmEngine(settings(models["v5"]))
    async with (
        serving(engine, tmp_path_factory.mktemp("server")) as found,
        httpx.AsyncClient(base_url=found.url, timeout=60) as http,  # vLLM's routes have no contract
    ):
        yield replace(found, http=http)


async def post(served: Served, path: str, body: Mapping[str, Any]) -> Any:
    response = await served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def chat(served: Served, prompt: str, **options: Any) -> Any:
    body = {"messages": messages(prompt), "logprobs": True, "return_token_ids": True, **GREEDY}
    return await post(served, "/v1/chat/completions", body | options)


async def rollout(served: Served, prompt: str, n: int = 1, **options: Any) -> Any:
    group = {"prompt": {"messages": messages(prompt)}, "n": n}
    body = {"groups": [group], "sampling": GREEDY, "echo": True, **options}
    return (await post(served, "/v1/rollouts", body))["groups"][0]


def logprobs_of(choice: Mapping[str, Any]) -> list[float]:
    return [token["logprob"] for token in choice["logprobs"]["content"]]


def assert_same(token_ids: Sequence[int], logprobs: Sequence[float], expected: Any) -> None:
    assert list(token_ids) == expected["token_ids"]
    assert logprobs == pytest.approx(expected["logprobs"], abs=MAX_LOGPROB_ERROR)


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_a_chat_has_the_samples_of_plain_vllm(
    served: Served, plain: Any, prompt: str
) -> None:
    expected = plain["v5"][prompt]
    answer = await chat(served, prompt)
    [choice] = answer["choices"]
    assert answer["prompt_token_ids"] == expected["prompt_token_ids"]
    assert_same(choice["token_ids"], logprobs_of(choice), expected)


def test_images_matter(plain: Any) -> None:
    first, second = plain["v5"]["one image"], plain["v5"]["another image"]
    assert first["prompt_token_ids"] == second["prompt_token_ids"]
    assert abs(first["logprobs"][0] - second["logprobs"][0]) > 0.01


async def test_a_rollout_has_the_samples_of_plain_vllm(served: Served, plain: Any) -> None:
    for prompt in PROMPTS:
        group, expected = await rollout(served, prompt), plain["v5"][prompt]
        [sample] = group["samples"]
        assert group["prompt_token_ids"] == expected["prompt_token_ids"]
        assert_same(sample["token_ids"], sample["logprobs"], expected)


async def test_samples_of_a_group_share_the_prompt(served: Served, plain: Any) -> None:
    """The KV of the prompt with its images is computed once, also for other requests."""
    group = await rollout(served, "two images", n=4)
    for sample in group["samples"]:
        assert_same(sample["token_ids"], sample["logprobs"], plain["v5"]["two images"])
    again = await chat(served, "two images")
    num_blocks = len(group["prompt_token_ids"]) // BLOCK
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= num_blocks * BLOCK


async def test_a_streamed_chat_has_the_tokens_of_the_whole(served: Served, plain: Any) -> None:
    body = {"messages": messages("two images"), "stream": True, "return_token_ids": True}
    async with served.http.stream("POST", "/v1/chat/completions", json=body | GREEDY) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    token_ids = [
        token
        for chunk in chunks
        for choice in chunk["choices"]
        for token in choice.get("token_ids") or ()
    ]
    assert token_ids == plain["v5"]["two images"]["token_ids"]


async def test_the_other_apis_take_images(served: Served) -> None:
    """The same prompt in each API's own form has the same text."""
    limits = {"temperature": 0, "max_tokens": 6}
    expected = (await chat(served, "one image", ignore_eos=False))["choices"][0]["message"]
    response = await post(
        served,
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": FIRST, "detail": "auto"},
                        {"type": "input_text", "text": TEXT},
                    ],
                }
            ],
            "temperature": 0,
            "max_output_tokens": 6,
        },
    )
    assert response["output"][-1]["content"][0]["text"] == expected["content"]
    source = {"type": "base64", "media_type": "image/png", "data": FIRST.partition(",")[2]}
    message = await post(
        served,
        "/v1/messages",
        {
            "model": served.server.engine.info.model,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": source},
                        {"type": "text", "text": TEXT},
                    ],
                }
            ],
            **limits,
        },
    )
    assert message["content"][0]["text"] == expected["content"]


async def test_new_weights_read_the_image_again(
    served: Served, plain: Any, models: dict[str, Path]
) -> None:
    """Neither the KV nor the embeddings of the earlier weights are used."""
    for version in ("v6", "v5"):
        content = (models[version] / "model.safetensors").read_bytes()
        label = f"{version}-again"
        created = await served.http.put(f"/v1/weights/{label}", content=content)
        assert created.status_code == 201, created.text
        activated = await served.http.post(f"/v1/weights/{label}/activate", json={})
        assert activated.status_code == 200, activated.text
        for prompt in ("one image", "two images"):
            group = await rollout(served, prompt)
            [sample] = group["samples"]
            assert_same(sample["token_ids"], sample["logprobs"], plain[version][prompt])
