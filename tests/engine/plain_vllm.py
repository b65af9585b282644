"""Samples of plain vLLM, in a process of its own without any hook of this project.

python -m tests.engine.plain_vllm MODEL < requests.json > samples.json
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 1234
ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRequest:
    """`n` samples of a prompt. `sampling` has the fields of vLLM's SamplingParams."""

    prompt: list[int]
    n: int
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSample:
    token_ids: list[int]
    logprobs: list[float]
    finish: str
    stop_reason: int | str | None


def plain_samples(model: Path, requests: dict[str, PlainRequest]) -> dict[str, list[PlainSample]]:
    """Samples by the name of their request."""
    asked = [
        {"prompt": each.prompt, "n": each.n, "sampling": each.sampling}
        for each in requests.values()
    ]
    command = [sys.executable, "-m", "tests.engine.plain_vllm", str(model)]
    answer = subprocess.run(
        command,
        input=json.dumps(asked),
        env=os.environ | ENVIRONMENT,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    found = json.loads(answer.splitlines()[-1])
    return {
        name: [PlainSample(**sample) for sample in samples]
        for name, samples in zip(requests, found, strict=True)
    }


def main(model: str) -> None:
    import torch
    from vllm import LLM

    torch.set_num_threads(1)
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=2**27,
        logprobs_mode="processed_logprobs",
        max_num_seqs=256,
        seed=SEED,
    )
    asked = json.load(sys.stdin)
    inputs = [{"prompt_token_ids": each["prompt"]} for each in asked for _ in range(each["n"])]
    params = [params_of(each["sampling"]) for each in asked for _ in range(each["n"])]
    outputs = iter(llm.generate(inputs, params, use_tqdm=False))
    ours = [name for name in sys.modules if name.split(".")[0] in ("engine", "kernels", "service")]
    assert not ours, ours
    print(json.dumps([[sample_of(next(outputs)) for _ in range(each["n"])] for each in asked]))


def params_of(sampling: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(sampling)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return SamplingParams(logprobs=0, detokenize=bool(given.get("stop")), **given)


def sample_of(output: Any) -> dict[str, Any]:
    [sample] = output.outputs
    pairs = zip(sample.token_ids, sample.logprobs, strict=True)
    return {
        "token_ids": list(sample.token_ids),
        "logprobs": [entry[token].logprob for token, entry in pairs],
        "finish": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }


if __name__ == "__main__":
    main(sys.argv[1])
