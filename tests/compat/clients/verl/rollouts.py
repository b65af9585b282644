"""verl's own manager, load balancer and rollout clients on a server, during weights updates.

python -m tests.compat.clients.verl.rollouts URL    prints the results
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

os.environ["VERL_USE_EXTERNAL_MODULES"] = (
    "coppice.integrations.verl.plugin"  # before verl is imported
)

import ray
import torch
from hydra import compose, initialize_config_module
from transformers import AutoModelForCausalLM
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

from coppice import AsyncRollouts
from coppice.integrations.verl.publisher import Publisher, ServerList
from tests.compat.clients.verl.training import COPPICE, MODEL

PROMPT = list(range(5, 25))
LONG = 1000
SAMPLING: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
}


def configured(url: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={MODEL}",
                f"{COPPICE}.name=coppice",
                f"+{COPPICE}.engine_kwargs.coppice.urls=[{url}]",
                f"{COPPICE}.checkpoint_engine.backend=coppice",
                f"{COPPICE}.tensor_model_parallel_size=1",
                f"{COPPICE}.nnodes=1",
                f"{COPPICE}.n_gpus_per_node=1",
                f"{COPPICE}.prompt_length=64",
                f"{COPPICE}.response_length=64",
            ],
        )


def published(url: str) -> Any:
    state = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict()
    publisher = Publisher(ServerList(urls=(url,)))
    return lambda step: publisher.publish(iter(state.items()), step)


async def running(url: str) -> None:
    async with AsyncRollouts(url) as rollouts:
        while not (await rollouts.status()).num_samples_running:
            await asyncio.sleep(0.02)


async def interrupted(url: str, client: Any, replica: Any, publish: Any) -> Any:
    """An update as verl's checkpoint manager performs it."""
    long = {**SAMPLING, "max_tokens": LONG, "ignore_eos": True}
    drawing = asyncio.ensure_future(
        client.generate("long", prompt_ids=PROMPT, sampling_params=long)
    )
    await running(url)
    await replica.abort_all_requests()
    await replica.release_kv_cache()
    await publish(2)
    await replica.resume_kv_cache()
    await replica.resume_generation()
    return await drawing


async def refusal(client: Any, **asked: Any) -> str:
    try:
        await client.generate("refused", prompt_ids=PROMPT, sampling_params={**SAMPLING, **asked})
    except Exception as error:  # whatever Ray wraps it in
        return str(error)
    return "not refused"


async def turned_away(client: Any, replica: Any) -> Any:
    await replica.abort_all_requests(reject_request=True)
    output = await client.generate("late", prompt_ids=PROMPT, sampling_params={**SAMPLING})
    await replica.resume_generation()
    return output


async def outputs(url: str) -> dict[str, Any]:
    manager = await LLMServerManager.create(config=configured(url))
    [replica] = manager.get_replicas()
    client, plain = manager.get_client(FullyAsyncLLMServerClient), manager.get_client()
    publish = published(url)
    await publish(1)
    whole = await plain.generate("whole", prompt_ids=PROMPT, sampling_params={**SAMPLING})
    long = await interrupted(url, client, replica, publish)
    return {
        "addresses": manager.get_addresses(),
        "whole": whole.model_dump(),
        "long": long.model_dump(),
        "turned_away": (await turned_away(plain, replica)).model_dump(),
        "refusal": await refusal(plain, min_p=0.1),
    }


if __name__ == "__main__":
    ray.init(num_cpus=8, include_dashboard=False)
    print(json.dumps(asyncio.run(outputs(sys.argv[1]))))
