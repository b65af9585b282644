"""The configuration of examples/verl, as verl reads it, and one step over its server without Ray.

The replica's part that samples and the adapter's part that publishes are called directly: Ray's
actors only forward to them. tests/compat/with_ray.py runs the whole trainer.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM, AutoTokenizer

from coppice import AsyncRollouts
from coppice.integrations.verl.generation import Generation, LengthLimits
from coppice.integrations.verl.publisher import Publisher, ServerList
from examples.verl import sums

ROOT = Path(__file__).parents[3]


def composed(url: str) -> Any:
    schema = ROOT / ".clients" / "verl" / "trainer" / "config"
    overrides = [
        f"hydra.searchpath=[file://{schema}]",  # pkg:// imports verl, which imports Ray
        f"actor_rollout_ref.rollout.engine_kwargs.coppice.urls=[{url}]",
    ]
    with initialize_config_dir(str(ROOT / "examples" / "verl"), version_base=None):
        return compose("grpo", overrides=overrides)


async def step(config: Any) -> dict[str, Any]:
    rollout, path = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.path
    servers = ServerList.of(rollout.engine_kwargs)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    version = await Publisher(servers).publish(iter(model.state_dict().items()), 1)
    limits = LengthLimits(
        prompt=rollout.prompt_length, response=rollout.response_length, context=512
    )
    generation = Generation(AsyncRollouts(servers.url(0)), limits)
    tokenizer = AutoTokenizer.from_pretrained(path)
    sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p, "logprobs": True}
    scores, steps = [], set()
    for number, row in enumerate(sums.rows(config.data.train_batch_size)):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        for sample in range(rollout.n):
            output = await generation.generate(f"{number}-{sample}", ids, dict(sampling))
            assert output.log_probs is not None and len(output.log_probs) == len(output.token_ids)
            text = tokenizer.decode(output.token_ids, skip_special_tokens=True)
            truth: Any = row["reward_model"]
            scores.append(sums.compute_score("sums", text, truth["ground_truth"]))
            steps.add(output.extra_fields["global_steps"])
    await generation.close()
    return {"name": rollout.name, "version": version, "scores": scores, "steps": sorted(steps)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(step(composed(sys.argv[1])))))
