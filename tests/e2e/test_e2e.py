"""All features at once, on a real engine behind a real server, called by the real client.

Every feature adds its check here. The oracle is Hugging Face in float32: greedy tokens must be
those of the version that each token is labelled with, and the engine must be empty at the end.
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

from coppice import Branching, Kv, SampleRecord, WeightsConstraint
from coppice.rollout_results import RolloutResult
from engine.speculation.settings import SpeculationSettings
from engine.types.feature_stats import SharedPrefixStats
from tests.e2e.broken_files import broken_files
from tests.e2e.drafter_checks import (
    check_drafter_still_drafts,
    check_opted_out_samples,
    submit_drafter,
)
from tests.e2e.kept_kv_checks import check_kept_kv
from tests.e2e.kv_reuse_checks import (
    check_predicted_prompts,
    check_spliced_prompts,
)
from tests.e2e.prompt_kv_checks import (
    assert_all_match_model,
    check_handles_survive_activation,
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
    """The value of one of vLLM's own counters."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(s.value for s in samples if s.name == f"vllm:{name}_total")


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
async def test_all_features_work_together(
    models: dict[str, Path], tmp_path: Path, num_ranks: int
) -> None:
    siblings = SpeculationSettings(mode="siblings")
    async with scene(models, tmp_path, num_ranks, siblings) as system:
        await run_everything(system, tmp_path)
        await check_opted_out_samples(system)
        await check_nothing_left(system)


@pytest.mark.exhaustive
async def test_all_features_work_together_with_a_drafter(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The drafter is the first weights' own model.

    It is right until other weights serve, and again after them. Drafters trained from it run A/B
    tests throughout, and one is uploaded.
    """
    drafter = SpeculationSettings(
        mode="drafter",
        longest_draft=4,
        drafter=models["v7"],
    )
    async with scene(models, tmp_path, 1, drafter) as system:
        brought = asyncio.create_task(submit_drafter(system))
        await run_everything(system, tmp_path)
        await brought
        await check_opted_out_samples(system)
        await check_drafter_still_drafts(system)
        await check_nothing_left(system)


async def run_everything(system: Scene, tmp_path: Path) -> None:
    v7, v8 = reference(system.models["v7"]), reference(system.models["v8"])
    await check_groups_and_preemption(system, v7)
    await check_prefixes_read_once(system)
    await check_update_weights_under_load(system, v7, v8)
    await check_broken_weights_refused(system, tmp_path, v8)
    await check_scores(system)
    await check_rollback(system, v7)
    await check_prompt_kv(system, v7, v8)
    await check_spliced_prompts(system.served, system.rollouts, "v8", v8)
    await check_predicted_prompts(system.served, system.rollouts, "v8", v8)
    await check_kept_kv(system, {"v7": v7, "v8": v8})


async def check_groups_and_preemption(system: Scene, v7: Any) -> None:
    before = counted("num_preemptions")
    result = await system.greedy(PROMPTS, 60, n=8)
    assert counted("num_preemptions") > before
    for prompt, group in zip(PROMPTS, result.groups, strict=True):
        assert len(group.samples) == 8
        for sample in group.samples:
            assert_whole_and_greedy(v7, prompt, sample, 60)


async def check_prefixes_read_once(system: Scene) -> None:
    # Half of the eight groups share whole blocks; drafts save up to five steps of six.
    async with asyncio.timeout(120):
        while system.engine.stats(SharedPrefixStats).rows_grouped < 4 * 8 * 60 // 6:
            await asyncio.sleep(0.1)
    counts = system.engine.stats(SharedPrefixStats)
    assert counts.prefix_bytes_not_read > 0 == counts.steps_skipped["failed"]
    metrics = (await system.served.http.get("/metrics")).text
    [steps] = re.findall(r"^coppice_shared_prefix_steps_total (\S+)$", metrics, re.MULTILINE)
    assert float(steps) >= counts.steps_grouped > 0


async def check_update_weights_under_load(system: Scene, v7: Any, v8: Any) -> None:
    before = counted("generation_tokens")
    straddling = asyncio.create_task(system.greedy([LONG], NUM_LONG))
    bound = asyncio.create_task(
        system.greedy([LONG], NUM_LONG, n=2, weights=WeightsConstraint(exact_version="v7"))
    )
    left = asyncio.create_task(disconnect_early(system))
    tree = asyncio.create_task(check_tree_growth(system))
    async with asyncio.timeout(60):
        # So many that all samples have some tokens.
        while counted("generation_tokens") < before + 100:
            await asyncio.sleep(0.005)
    await system.rollouts.pause("keep")
    tensors = load_file(system.models["v8"] / "model.safetensors")
    await system.rollouts.publish_weights("v8", tensors, mode="recompute")
    await system.rollouts.resume()
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


async def check_tree_growth(system: Scene) -> RolloutResult:
    """Grows a tree, greedily, so that all paths are equal.

    Paths fork before and after the weights change.
    """
    branching = Branching(mode="interval", interval=96, max_depth=3, max_leaves=8)
    return await system.greedy([TREE], NUM_LONG, branching=branching)


async def check_tree(result: RolloutResult, v7: Any, v8: Any) -> None:
    [group] = result.groups
    assert group.tree is not None
    assert len(group.tree.leaves) == 8
    made_by = set()
    for row in group.tree.rows():
        tokens = row.token_ids.tolist()
        system = 0
        for span in row.versions:
            model = {"v7": v7, "v8": v8}[span.version]
            assert_greedy(model, TREE + tokens[:system], tokens[system : span.end])
            system = span.end
            made_by.add(span.version)
        assert system == NUM_LONG
    assert "v8" in made_by


async def disconnect_early(system: Scene) -> None:
    """Disconnects after the first finished sample; the long ones must be aborted."""
    async for record in system.rollouts.stream([LONG], n=4, max_tokens=400, temperature=2.0):
        if isinstance(record, SampleRecord):
            break
        await asyncio.sleep(0.3)
        break


async def check_broken_weights_refused(system: Scene, tmp_path: Path, v8: Any) -> None:
    sampling = asyncio.create_task(system.greedy([PROMPTS[2]], 200))
    tensors = load_file(system.models["v7"] / "model.safetensors")
    for file, word in broken_files(tensors, tmp_path).items():
        answer = await system.served.http.put("/v1/weights/v9", content=file.read_bytes())
        assert (answer.status_code, answer.json()["code"]) == (422, "weights_refused"), file.name
        assert word in answer.json()["detail"], file.name
        assert str(tmp_path) not in answer.text
    (sample,) = (await sampling).groups[0].samples
    assert_whole_and_greedy(v8, PROMPTS[2], sample, 200)
    assert (await system.rollouts.weights()).active == "v8"


async def check_scores(system: Scene) -> None:
    result = await system.rollouts.rollout([PROMPTS[3]], n=2, max_tokens=40, ignore_eos=True)
    responses = [sample.token_ids for sample in result.groups[0].samples]
    (scored,) = await system.rollouts.score([(PROMPTS[3], responses)])
    assert set(scored.versions) == {"v8"}
    for sample, logprobs in zip(result.groups[0].samples, scored.logprobs, strict=True):
        assert abs(sample.logprobs - logprobs).max() < 1e-3


async def check_rollback(system: Scene, v7: Any) -> None:
    await system.rollouts.activate_weights("v7", mode="keep", allow_rollback=True)
    result = await system.greedy(PROMPTS[:3], 30, weights=WeightsConstraint(exact_version="v7"))
    for prompt, group in zip(PROMPTS, result.groups, strict=False):
        assert_whole_and_greedy(v7, prompt, group.samples[0], 30)


async def check_prompt_kv(system: Scene, v7: Any, v8: Any) -> None:
    result = await system.rollouts.rollout(PROMPTS, n=4, max_tokens=40, kv=Kv())
    await assert_all_match_model(system.served, result.groups, PROMPTS, "v7", v7)
    await check_handles_survive_activation(system.served, system.rollouts, ("v7", v7), ("v8", v8))


async def check_nothing_left(system: Scene) -> None:
    await release_all(system.served)
    pool = await system.engine.llm.engine_core.call_utility_async("coppice_check_pool")
    assert pool["num_free_blocks"] == pool["num_blocks"]
    assert (pool["num_references"], pool["num_requests"], pool["num_tables"]) == (0, 0, 0)
    status = await system.rollouts.status()
    assert (status.num_rollouts_running, status.num_samples_running) == (0, 0)
