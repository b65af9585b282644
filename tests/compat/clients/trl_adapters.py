"""TRL's adapter code, called step by step as in AsyncGRPO.

Its trainer is left out because it needs a GPU. Covered: detection of adapter support, saving,
loading and unloading adapters, and sampling by name.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import peft
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter, select_adapter_sync
from trl.experimental.async_grpo.vllm_client import VLLMClient

MODEL = Path(__file__).parents[3] / "examples" / "seedling" / "model"
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18] * 9
STALENESS = 1
STEPS = 3


def learned(model: Any) -> None:
    """Changes the weights enough to distinguish the two policies."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)


def of_trainer(model: Any, token_ids: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1]
    chosen = torch.tensor(token_ids)[:, None]
    logprobs: list[float] = logits.log_softmax(-1).gather(-1, chosen)[:, 0].tolist()
    return logprobs


def sampled(url: str, name: str) -> Any:
    asked = {"model": name, "prompt": PROMPT, "n": 1, "logprobs": 0, "max_tokens": 16}
    extra = {"return_token_ids": True, "return_weight_versions": True}
    answer = httpx.post(f"{url}/v1/completions", json={**asked, **extra}, timeout=60)
    return answer.raise_for_status().json()["choices"][0]


def main(url: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear")).eval()
    accelerator = Accelerator(cpu=True)
    client = VLLMClient(url)
    client.wait_for_server_ready()
    wanted = SimpleNamespace(max_staleness=STALENESS)
    adapters = select_adapter_sync(client.get_server_info(), model, wanted)
    steps = []
    for version in range(STEPS):
        learned(model)
        name = f"trl-policy-v{version}"
        save_lora_adapter(model, accelerator, "default", str(folder / name))
        client.pause()
        client.load_lora_adapter(name, str(folder / name))
        client.resume()
        client.unload_lora_adapter(f"trl-policy-v{version - STALENESS - 1}")
        choice = sampled(url, name)
        steps.append(
            {
                "served": choice["logprobs"]["token_logprobs"],
                "trainer": of_trainer(model, choice["token_ids"]),
                "adapter": choice["weight_versions"][0]["adapter"],
            }
        )
    models = [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]]
    for version in range(STEPS - STALENESS - 1, STEPS):
        client.unload_lora_adapter(f"trl-policy-v{version}")
    return {"adapters": adapters, "steps": steps, "models": models}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
