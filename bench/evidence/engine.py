"""Measurements of one engine of the model of `bench.harness.random_model`.

    python -m bench.evidence.engine NAME --models DIRECTORY [--rehearse]

The last line of the output is the result as JSON. With `--rehearse` the model and the workload are
so small that a CPU runs them.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from bench.evidence.workloads import ON_GPU, REHEARSAL, Run, Size, Workload
from bench.harness.random_model import SHAPES, write_model
from engine.kv_types import ExportSlot, ExportStatus
from engine.settings import AttentionSettings, EngineSettings, SpeculationSettings
from engine.types import Completion
from engine.vllm_engine import VllmEngine

VLLM_CPU_DEFAULTS: Final = {"block_size": 32, "max_sequences": 256, "max_batched_tokens": 2048}
ALIGNMENT: Final = 64


Measure = Callable[[Run, Size, Path], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    measure: Measure
    settings: Mapping[str, Any]
    shared_prefix: str = "off"
    speculation: str = "off"


async def throughput(run: Run, size: Size, _: Path) -> dict[str, Any]:
    """Tokens per second where samples share their prompts, and where they do not."""
    results: dict[str, Any] = {}
    for name, workload in (("shared", size.shared), ("unshared", size.unshared)):
        await run.batch(workload)  # compiles and captures what is left
        results[name] = [await run.batch(workload) for _ in range(2)]
    return results | await run.counters()


async def greedy(run: Run, size: Size, models: Path) -> dict[str, Any]:
    """Greedy tokens against a float32 forward of Hugging Face's model on the CPU."""
    workload = Workload(groups=4, samples=2, prompt=160, tokens=32)
    completions = await asyncio.gather(*await run.submit(workload, temperature=0.0))
    counters = await run.counters()
    prompts = [prompt for prompt in run.prompts(workload) for _ in range(workload.samples)]
    reference = _reference(models / size.model)
    judged = [_judge(reference, *each) for each in zip(prompts, completions, strict=True)]
    equal, behind, error = zip(*judged, strict=True)
    return {
        "share_of_tokens_equal": sum(equal) / len(equal) / workload.tokens,
        "largest_logit_gap": max(behind),
        "largest_logprob_error": max(error),
        "attention": counters["attention"],
    }


def _reference(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def _judge(model: Any, prompt: list[int], completion: Completion) -> tuple[int, float, float]:
    """Tokens that are the reference's choice, its largest logit gap, and logprob error."""
    tokens = torch.tensor(completion.token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
    logits = logits[len(prompt) - 1 : -1]
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    own = chosen - logits.logsumexp(1)
    equal = int((logits.argmax(1) == tokens).sum())
    gap = float((logits.amax(1) - chosen).max())
    return equal, gap, float((own - torch.tensor(completion.logprobs)).abs().max())


async def burst(run: Run, size: Size, _: Path) -> dict[str, Any]:
    """Export of many long prompts at once: seconds, bytes, and how many were committed."""
    workload, results = size.burst, []
    per_token = run.engine.info.kv_bytes_per_token
    stride = 2 * ALIGNMENT + -(-workload.prompt * per_token // ALIGNMENT) * ALIGNMENT
    gpu_bytes = min((rank.num_bytes for rank in run.engine.info.kv_gpu_memory), default=0)
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="coppice-bench-") as arena:
        os.posix_fallocate(arena.fileno(), 0, stride * workload.groups)
        slots = [
            ExportSlot(
                arena=Path(arena.name),
                offset=group * stride + ALIGNMENT,
                status_offset=group * stride,
                num_tokens=workload.prompt - 1,
                gpu_offset=group * stride if (group + 1) * stride <= gpu_bytes else None,
            )
            for group in range(workload.groups)
        ]
        for exported in (slots, slots, ()):
            for slot in slots:
                os.pwrite(arena.fileno(), bytes(8), slot.status_offset)
            began = time.perf_counter()
            await asyncio.gather(*await run.submit(workload, slots=exported))
            prefilled = time.perf_counter() - began
            await run.engine.flush_exports()
            words = [os.pread(arena.fileno(), 8, slot.status_offset) for slot in slots]
            committed = sum(int.from_bytes(w, "little") == ExportStatus.COMMITTED for w in words)
            results.append(
                {
                    "exports": len(exported),
                    "prefill_seconds": prefilled,
                    "all_seconds": time.perf_counter() - began,
                    "committed": committed,
                }
            )
    reasons = {feature.name: feature.reason for feature in run.engine.info.features}
    return {
        "bytes_per_handle": (workload.prompt - 1) * per_token,
        "copies": reasons["direct_kv_copies"],
        "on_gpu": reasons["prompt_kv_on_gpu"],
        "bursts": results,
    }


async def activation(run: Run, size: Size, models: Path) -> dict[str, Any]:
    """New weights while samples run: seconds of the pause and its parts, twice."""
    other = write_model(models / f"{size.model}-other", size.model, seed=1)
    engine, results = run.engine, []
    for number, path in enumerate((other, models / size.model)):
        await asyncio.to_thread(engine.check_weights, path)
        running = await run.submit(size.reloaded)
        await asyncio.sleep(0.5)
        seconds: dict[str, float] = {}
        steps: tuple[tuple[str, Callable[[], Awaitable[object]]], ...] = (
            ("pause", lambda: engine.pause("keep")),
            ("load", lambda p=path, n=number: engine.update_weights(p, f"v{n}")),  # type: ignore[misc]
            ("reset", engine.reset_prefix_cache),
            ("resume", engine.resume),
        )
        for name, step in steps:
            began = time.perf_counter()
            await step()
            seconds[name] = time.perf_counter() - began
        completions = await asyncio.gather(*running)
        versions = {span.version for each in completions for span in each.versions}
        results.append({"seconds": seconds, "versions": sorted(versions)})
    after = await greedy(run, size, models)
    return {"activations": results, "afterwards": after}


MEASUREMENTS: Final[Mapping[str, Measurement]] = {
    "greedy": Measurement(measure=greedy, settings={}),
    "defaults": Measurement(measure=throughput, settings={}),
    "small-limits": Measurement(measure=throughput, settings=VLLM_CPU_DEFAULTS),
    "greedy-shared": Measurement(measure=greedy, settings={}, shared_prefix="always"),
    "burst": Measurement(measure=burst, settings={"prompt_kv": True}),
    "burst-on-gpu": Measurement(
        measure=burst, settings={"prompt_kv": True, "prompt_kv_gpu_bytes": 2**32}
    ),
    "activation": Measurement(measure=activation, settings={}),
    **{
        f"shared-prefix-{mode}": Measurement(measure=throughput, settings={}, shared_prefix=mode)
        for mode in ("off", "always", "auto")
    },
    **{
        f"speculation-{mode}": Measurement(measure=throughput, settings={}, speculation=mode)
        for mode in ("off", "siblings", "drafter")
    },
}


async def measure(name: str, models: Path, size: Size) -> dict[str, Any]:
    chosen = MEASUREMENTS[name]
    model = write_model(models / size.model, size.model)
    with tempfile.TemporaryDirectory() as cache:
        engine = VllmEngine(
            EngineSettings(
                model=str(model), seed=0, max_context_tokens=size.context, **chosen.settings
            ),
            attention=AttentionSettings.model_validate(
                {"shared_prefix": chosen.shared_prefix, "cache_directory": cache}
            ),
            speculation=_speculation(chosen.speculation, models, size, Path(cache)),
        )
        began = time.perf_counter()
        try:
            await engine.start("v0")
            started = time.perf_counter() - began
            run = Run(engine, SHAPES[size.model]["vocab_size"])
            result = await chosen.measure(run, size, models)
            info = engine.info
        finally:
            await engine.stop()
    facts = {"device": info.device, "blocks": info.num_blocks, "block_size": info.block_size}
    return {"start_seconds": started, **facts, **result}


def _speculation(mode: str, models: Path, size: Size, cache: Path) -> SpeculationSettings:
    if mode != "drafter":
        return SpeculationSettings.model_validate(
            {"mode": mode, "cache_directory": cache, "allow_predicted_loss": True}
        )
    return SpeculationSettings(
        mode="drafter",
        allow_predicted_loss=True,
        drafter=write_model(models / size.drafter, size.drafter),
        drafter_directory=cache / "drafter",
        cache_directory=cache,
        drafter_training=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MEASUREMENTS)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    size = REHEARSAL if arguments.rehearse else ON_GPU
    result = asyncio.run(measure(arguments.name, arguments.models, size))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
