"""Everything at once, on a real engine behind a real server, called by the real client.

Every capability adds its row here. The oracle is Hugging Face in float32: greedy tokens must be
those of the version that each token is labelled with, and nothing may be left in the engine.
"""

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from coppice import Branching, Kv, Policy, SampleRecord
from coppice.results import RolloutResult
from engine.settings import SpeculationSettings
from tests.e2e.broken_files import broken_files
from tests.e2e.drafter_checks import (
    a_drafter_is_brought,
    the_drafter_drafts_on,
    who_wants_no_drafts_gets_none,
)
from tests.e2e.kv_reuse_checks import (
    placed_prompts_are_what_was_meant,
    predicted_prompts_are_what_was_meant,
    shared_texts_become_a_prefix,
)
from tests.e2e.prompt_kv_checks import (
    assert_all_are_the_models,
    handles_outlive_an_activation_under_their_own_version,
    release_all,
)
from tests.e2e.scene import Scene, scene
from tests.engine.greedy import assert_greedy
from tests.engine.random_models import make_models
from tests.engine.seedling import MODEL as SEEDLING

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROMPTS = [[7 + g, *range(20, 20 + 9 * g + 3)] for g in range(8)]
LONG = [3, 1, 4, 1, 5, 9, 2, 6]
NUM_LONG = 480
DRAFTS = "drafts"
TREE = [2, 7, 1, 8, 2, 8, 1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = make_models(tmp_path_factory.mktemp("together"), tied=True)
    for folder in made.values():
        for file in SEEDLING.glob("tokenizer*"):
            shutil.copy(file, folder)
    return made


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_whole_and_greedy(model: Any, prompt: list[int], sample: Any, num: int) -> None:
    assert len(sample.token_ids) == num
    assert_greedy(model, prompt, sample.token_ids.tolist())


def counted(name: str) -> float:
    """By vLLM."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(s.value for s in samples if s.name == f"vllm:{name}_total")


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_everything_at_once(models: dict[str, Path], tmp_path: Path, num_ranks: int) -> None:
    siblings = SpeculationSettings(
        mode="siblings", cache_directory=tmp_path, store_file=tmp_path / DRAFTS
    )
    async with scene(models, tmp_path, num_ranks, siblings) as at:
        await all_that_happens(at, tmp_path)
        await who_wants_no_drafts_gets_none(at)
        await nothing_is_left(at)
    assert (tmp_path / DRAFTS).stat().st_size > 0


async def test_everything_at_once_with_a_drafter(models: dict[str, Path], tmp_path: Path) -> None:
    """It is the first weights' own model: right until others serve, and again after them. What is
    trained from it stands trials all the while, and one comes from elsewhere."""
    drafter = SpeculationSettings(
        mode="drafter",
        longest_draft=4,
        cache_directory=tmp_path,
        drafter=models["v7"],
        drafter_directory=tmp_path / "drafters",
        drafter_busy_share=1.0,
    )
    async with scene(models, tmp_path, 1, drafter) as at:
        brought = asyncio.create_task(a_drafter_is_brought(at))
        await all_that_happens(at, tmp_path)
        await brought
        await who_wants_no_drafts_gets_none(at)
        await the_drafter_drafts_on(at)
        await nothing_is_left(at)


async def all_that_happens(at: Scene, tmp_path: Path) -> None:
    v7, v8 = reference(at.models["v7"]), reference(at.models["v8"])
    await groups_share_and_are_preempted(at, v7)
    await prefixes_were_read_once(at)
    await weights_change_under_running_samples(at, v7, v8)
    await broken_weights_are_refused_while_others_sample(at, tmp_path, v8)
    await scores_are_the_active_versions(at)
    await going_back_gives_the_first_answers_again(at, v7)
    await prompt_kv_is_the_models_and_of_its_own_version(at, v7, v8)
    await placed_prompts_are_what_was_meant(at.served, at.rollouts, "v8", v8)
    await predicted_prompts_are_what_was_meant(at.served, at.rollouts, "v8", v8)
    await shared_texts_become_a_prefix(at.served, at.rollouts)


async def groups_share_and_are_preempted(at: Scene, v7: Any) -> None:
    before = counted("num_preemptions")
    result = await at.greedy(PROMPTS, 60, n=8)
    assert counted("num_preemptions") > before
    for prompt, group in zip(PROMPTS, result.groups, strict=True):
        assert len(group.samples) == 8
        for sample in group.samples:
            assert_whole_and_greedy(v7, prompt, sample, 60)


async def prefixes_were_read_once(at: Scene) -> None:
    # Half of the eight groups share whole blocks; drafts spare up to five steps of six.
    async with asyncio.timeout(120):
        while at.engine.shared_prefix().rows_grouped < 4 * 8 * 60 // 6:
            await asyncio.sleep(0.1)
    counts = at.engine.shared_prefix()
    assert counts.prefix_bytes_not_read > 0 == counts.steps_skipped["failed"]
    metrics = (await at.served.http.get("/metrics")).text
    [steps] = re.findall(r"^coppice_shared_prefix_steps_total (\S+)$", metrics, re.MULTILINE)
    assert float(steps) >= counts.steps_grouped > 0


async def weights_change_under_running_samples(at: Scene, v7: Any, v8: Any) -> None:
    before = counted("generation_tokens")
    straddling = asyncio.create_task(at.greedy([LONG], NUM_LONG))
    bound = asyncio.create_task(at.greedy([LONG], NUM_LONG, n=2, policy=Policy(exact_version="v7")))
    left = asyncio.create_task(leave_early(at))
    tree = asyncio.create_task(grow_a_tree(at))
    async with asyncio.timeout(60):
        # So many that all of them have some.
        while counted("generation_tokens") < before + 100:
            await asyncio.sleep(0.005)
    await at.rollouts.pause("keep")
    tensors = load_file(at.models["v8"] / "model.safetensors")
    await at.rollouts.publish_weights("v8", tensors, mode="recompute")
    await at.rollouts.resume()
    (sample,) = (await straddling).groups[0].samples
    assert [span.version for span in sample.versions] == ["v7", "v8"]
    change, tokens = sample.versions[0].end, sample.token_ids.tolist()
    assert len(tokens) == NUM_LONG
    assert_greedy(v7, LONG, tokens[:change])
    assert_greedy(v8, LONG + tokens[:change], tokens[change:])
    for ended in (await bound).groups[0].samples:
        assert ended.finish_reason == "version_changed"
        kept = ended.token_ids.tolist()
        assert {span.version for span in ended.versions} == {"v7"}
        assert_greedy(v7, LONG, kept)
    await left
    await check_tree(await tree, v7, v8)


async def grow_a_tree(at: Scene) -> RolloutResult:
    """Greedy, so every path is the same; paths fork before the weights change, and after."""
    branching = Branching(mode="interval", interval=96, max_depth=3, max_leaves=8)
    return await at.greedy([TREE], NUM_LONG, branching=branching)


async def check_tree(result: RolloutResult, v7: Any, v8: Any) -> None:
    [group] = result.groups
    assert group.tree is not None
    assert len(group.tree.leaves) == 8
    made_by = set()
    for row in group.tree.rows():
        tokens = row.token_ids.tolist()
        at = 0
        for span in row.versions:
            model = {"v7": v7, "v8": v8}[span.version]
            assert_greedy(model, TREE + tokens[:at], tokens[at : span.end])
            at = span.end
            made_by.add(span.version)
        assert at == NUM_LONG
    assert "v8" in made_by


async def leave_early(at: Scene) -> None:
    """Sees one sample end and goes; the long ones must not stay."""
    async for record in at.rollouts.stream([LONG], n=4, max_tokens=400, temperature=2.0):
        if isinstance(record, SampleRecord):
            break
        await asyncio.sleep(0.3)
        break


async def broken_weights_are_refused_while_others_sample(
    at: Scene, tmp_path: Path, v8: Any
) -> None:
    sampling = asyncio.create_task(at.greedy([PROMPTS[2]], 200))
    tensors = load_file(at.models["v7"] / "model.safetensors")
    for file, word in broken_files(tensors, tmp_path).items():
        answer = await at.served.http.put("/v1/weights/v9", content=file.read_bytes())
        assert (answer.status_code, answer.json()["code"]) == (422, "weights_refused"), file.name
        assert word in answer.json()["detail"], file.name
        assert str(tmp_path) not in answer.text
    (sample,) = (await sampling).groups[0].samples
    assert_whole_and_greedy(v8, PROMPTS[2], sample, 200)
    assert (await at.rollouts.weights()).active == "v8"


async def scores_are_the_active_versions(at: Scene) -> None:
    result = await at.rollouts.rollout([PROMPTS[3]], n=2, max_tokens=40, ignore_eos=True)
    responses = [sample.token_ids for sample in result.groups[0].samples]
    (scored,) = await at.rollouts.score([(PROMPTS[3], responses)])
    assert set(scored.versions) == {"v8"}
    for sample, logprobs in zip(result.groups[0].samples, scored.logprobs, strict=True):
        assert abs(sample.logprobs - logprobs).max() < 1e-3


async def going_back_gives_the_first_answers_again(at: Scene, v7: Any) -> None:
    await at.rollouts.activate_weights("v7", mode="keep", allow_rollback=True)
    result = await at.greedy(PROMPTS[:3], 30, policy=Policy(exact_version="v7"))
    for prompt, group in zip(PROMPTS, result.groups, strict=False):
        assert_whole_and_greedy(v7, prompt, group.samples[0], 30)


async def prompt_kv_is_the_models_and_of_its_own_version(at: Scene, v7: Any, v8: Any) -> None:
    result = await at.rollouts.rollout(PROMPTS, n=4, max_tokens=40, kv=Kv())
    await assert_all_are_the_models(at.served, result.groups, PROMPTS, "v7", v7)
    await handles_outlive_an_activation_under_their_own_version(
        at.served, at.rollouts, ("v7", v7), ("v8", v8)
    )


async def nothing_is_left(at: Scene) -> None:
    await release_all(at.served)
    pool = await at.engine.llm.engine_core.call_utility_async("coppice_check_pool")
    assert pool["num_free_blocks"] == pool["num_blocks"]
    assert (pool["num_references"], pool["num_requests"], pool["num_tables"]) == (0, 0, 0)
    status = await at.rollouts.status()
    assert (status.rollouts_running, status.samples_running) == (0, 0)
