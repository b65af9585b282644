"""miles' engine handle and generation, with this server as its external engine.

python -m tests.compat.clients.miles.rollouts URL WEIGHTS    prints the results
"""

import argparse
import ast
import asyncio
import json
import sys
from copy import deepcopy
from dataclasses import make_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import httpx
import requests
from transformers import AutoTokenizer

MODEL = Path(__file__).parents[4] / "examples" / "seedling" / "model"
PROMPT = "Compute 12+34.\n"
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 48,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


def stand_in_for_sglang() -> None:
    """Stub for sglang, which miles imports to start engines and which requires torchvision.

    Its settings are real.
    """
    package = find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    source = Path(package.submodule_search_locations[0], "srt", "server_args.py").read_text()
    [settings] = [
        part
        for part in ast.parse(source).body
        if isinstance(part, ast.ClassDef) and part.name == "ServerArgs"
    ]
    names = [
        part.target.id
        for part in settings.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]
    for name in ("sglang", "sglang.srt", "sglang.srt.server_args", "sglang.srt.utils"):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules["sglang.srt.server_args"])["ServerArgs"] = make_dataclass("ServerArgs", names)
    vars(sys.modules["sglang.srt.utils"])["kill_process_tree"] = None


def settings(host: str, port: int) -> argparse.Namespace:
    return argparse.Namespace(
        hf_checkpoint=str(MODEL),
        rollout_external=True,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        num_gpus_per_node=8,
        debug_rollout_only=True,
        rollout_max_response_len=48,
        rollout_max_context_len=None,
        sglang_router_ip=host,
        sglang_router_port=port,
        sglang_dp_size=1,
        sglang_pp_size=1,
        sglang_ep_size=1,
        sglang_server_concurrency=8,
        sglang_speculative_algorithm=None,
        seed=0,
        lora_rank=0,
        lora_adapter_path=None,
        env_report=None,
        **dict.fromkeys(
            [
                *("colocate", "use_critic", "offload_rollout", "fp16", "use_miles_router"),
                *("use_rollout_routing_replay", "use_distributed_post"),
            ],
            False,
        ),
    )


def attached(args: argparse.Namespace) -> Any:
    """The engine handle as in its Ray actor, after it has validated the server's info."""
    from miles.backends.sglang_utils.sglang_engine import SGLangEngine

    engine = SGLangEngine(args, rank=0)
    host, port = args.sglang_router_ip, args.sglang_router_port
    engine.init(dist_init_addr=f"{host}:{port}", port=port, nccl_port=None, host=host)
    return engine


def updated(engine: Any, weights: str) -> str:
    """Updates the weights from disk as miles does."""
    engine.health_generate()
    engine.pause_generation(mode="retract")
    engine.flush_cache()
    engine.update_weights_from_disk(weights)
    engine.continue_generation()
    return str(engine.get_weight_version())


def refusal(engine: Any) -> str:
    try:
        engine.update_weights_from_tensor(["none"])
    except requests.HTTPError as error:
        return "".join(error.__notes__)
    return "not refused"


class State:
    """The part of miles' GenerateState that a single turn reads."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.processor = None


async def generate_sample(args: argparse.Namespace, sample: Any, **more: Any) -> Any:
    from miles.rollout.base_types import GenerateFnInput
    from miles.rollout.generate_hub.single_turn import generate

    asked = GenerateFnInput(
        state=State(args), sample=sample, sampling_params={**SAMPLING, **more}, evaluation=False
    )
    return (await generate(asked)).samples


async def aborted(args: argparse.Namespace, url: str, sample: Any) -> Any:
    """miles aborts all requests once it has enough groups, and continues them later."""
    drawing = asyncio.create_task(
        generate_sample(args, sample, max_new_tokens=2000, ignore_eos=True)
    )
    async with httpx.AsyncClient(base_url=url) as http:
        while not (await http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"]:
            await asyncio.sleep(0.02)
        (await http.post("/abort_request", json={"abort_all": True})).raise_for_status()
    return await drawing


async def outputs(url: str, weights: str) -> dict[str, Any]:
    from miles.utils.http_utils import init_http_client
    from miles.utils.types import Sample

    address = urlsplit(url)
    args = settings(address.hostname or "", address.port or 0)
    init_http_client(args)
    whole = (await generate_sample(args, Sample(prompt=PROMPT))).to_dict()
    part = await aborted(args, url, Sample(prompt=PROMPT))
    before = deepcopy(part.to_dict())  # it is continued in place
    engine = await asyncio.to_thread(attached, args)
    version = await asyncio.to_thread(updated, engine, weights)
    resumed = await generate_sample(
        args, part, max_new_tokens=part.response_length + 16, ignore_eos=True
    )
    return {
        "whole": whole,
        "part": before,
        "resumed": resumed.to_dict(),
        "version": version,
        "refusal": await asyncio.to_thread(refusal, engine),
    }


if __name__ == "__main__":
    stand_in_for_sglang()
    print(json.dumps(asyncio.run(outputs(*sys.argv[1:]))))
