"""P5: every token is labelled with the version that sampled it.

Two versions of the seedling model, greedy in float32, are swapped repeatedly under load. Each
version span must equal the greedy continuation by a Hugging Face forward with that version's
weights. After `keep`, KV of the tokens before a swap stays as the older weights computed it, so the
check is exact for the first span only.
"""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.vllm_engine import VllmEngine
from tests.engine.greedy import assert_greedy
from tests.engine.seedling import MODEL, reference, settings
from tests.serving import Served, serving

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

MAX_TOKENS = 120
CALLERS = 4
SWAPS = 4
CHECKED = 8


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, perturbed enough to choose other tokens."""
    directory = tmp_path_factory.mktemp("versions") / "other"
    shutil.copytree(MODEL, directory)
    draw = torch.Generator().manual_seed(11)
    disturbed = {
        name: (values + 0.2 * values.std() * torch.randn(values.shape, generator=draw)).to(
            values.dtype
        )
        for name, values in load_file(MODEL / "model.safetensors").items()
    }
    save_file(disturbed, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def ask(served: Served, number: int, over: asyncio.Event) -> list[dict[str, Any]]:
    """Sends one request after another until `over` is set; returns prompts with their samples."""
    answered = []
    while not over.is_set():
        prompt = [number + 3, *range(4, 4 + 7 * number), number + 5]
        body = {
            "groups": [{"prompt": {"token_ids": prompt}, "n": 2}],
            "sampling": {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True},
        }
        answer = await served.http.post("/v1/rollouts", json=body)
        for sample in answer.json()["groups"][0]["samples"]:
            answered.append({"prompt": prompt, **sample})
    return answered


async def swapped_under_load(served: Served, mode: str) -> list[dict[str, Any]]:
    """The samples with the most swaps."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        callers = [tasks.create_task(ask(served, i, over)) for i in range(CALLERS)]
        for turn in range(SWAPS):
            await asyncio.sleep(0.3)
            version = ("other", "first")[turn % 2]
            activated = await served.http.post(
                f"/v1/weights/{version}/activate", json={"mode": mode, "allow_rollback": True}
            )
            assert activated.status_code == 200, activated.text
        over.set()
    samples = [sample for caller in callers for sample in caller.result()]
    return sorted(samples, key=lambda sample: -len(sample["versions"]))[:CHECKED]


def checked(samples: list[dict[str, Any]], models: dict[str, Any], *, whole: bool) -> Iterator[str]:
    for sample in samples:
        spans, tokens = sample["versions"], sample["token_ids"]
        assert sum(span["end"] - span["start"] for span in spans) == len(tokens)
        for span in spans if whole else spans[:1]:
            before = [*sample["prompt"], *tokens[: span["start"]]]
            assert_greedy(models[span["version"]], before, tokens[span["start"] : span["end"]])
        yield "-".join(span["version"] for span in spans)


async def test_every_token_is_the_greedy_choice_of_its_labelled_version(
    tmp_path: Path, other: Path
) -> None:
    models = {"first": reference(), "other": reference(other)}
    weights = {"source_directories": (other,), "initial_version": "first"}
    engine = VllmEngine(settings(cpu_threads=1))
    async with serving(engine, tmp_path, weights=weights) as served:
        staged = await served.http.post("/v1/weights/other", json={"path": str(other)})
        assert staged.status_code == 201, staged.text
        recomputed = await swapped_under_load(served, "recompute")
        kept = await swapped_under_load(served, "keep")
    histories = set(checked(recomputed, models, whole=True))
    assert any("-" in history for history in histories), "no sample met a swap"
    histories = set(checked(kept, models, whole=False))
    assert any("-" in history for history in histories), "no sample met a swap"
