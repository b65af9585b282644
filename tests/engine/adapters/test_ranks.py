"""Adapters under tensor parallelism, in an engine with the service's worker processes."""

from pathlib import Path

import pytest

from engine.errors import LoadFailed
from engine.types.samples import SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from tests.engine.adapters.peft_adapters import saved, under
from tests.engine.seedling import BLOCK, settings, teacher_forced

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore"),
]

PROMPT = [5 + i % 60 for i in range(2 * BLOCK + 7)]
SAMPLES = 2


def requests(label: str | None) -> list[SampleRequest]:
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    return [
        SampleRequest(id=f"{label}-{i}", prompt_token_ids=PROMPT, sampling=sampling, adapter=label)
        for i in range(SAMPLES)
    ]


async def test_two_ranks_sample_the_tokens_of_peft(tmp_path: Path) -> None:
    """Concurrently with each other and with the base model, split by rows and by columns."""
    paths: dict[str | None, Path | None] = {
        None: None,
        "policy@1": saved(tmp_path / "all", seed=1),
        "policy@2": saved(
            tmp_path / "some", seed=2, rank=4, target_modules=["q_proj", "down_proj"]
        ),
    }
    split = settings(tensor_parallel_size=2, cpu_threads=1, max_adapters=3, max_adapter_rank=8)
    engine = VllmEngine(split)
    try:
        await engine.start("v0")
        for label, path in paths.items():
            if label is not None and path is not None:
                engine.check_adapter(path)
                await engine.load_adapter(label, path)
        with pytest.raises(LoadFailed):
            await engine.load_adapter("policy@3", tmp_path / "nowhere")
        pending = await engine.submit([one for label in paths for one in requests(label)])
        drawn = [await completion for completion in pending]
    finally:
        await engine.stop()
    for i, path in enumerate(paths.values()):
        model = under(path)
        for completion in drawn[i * SAMPLES : (i + 1) * SAMPLES]:
            expected = teacher_forced(model, PROMPT, completion.token_ids)
            assert completion.logprobs == pytest.approx(expected, abs=1e-3)
