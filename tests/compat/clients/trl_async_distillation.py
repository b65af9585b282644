"""TRL's asynchronous distillation trainer, with the server as its student's server and its teacher.

Two things differ from a run on a GPU. TRL's default attention is FlashAttention; eager attention
separates the packed sequences by their position ids, too. And TRL requests the name of the GPU.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_distillation import AsyncDistillationConfig, AsyncDistillationTrainer

from coppice import Rollouts
from coppice.integrations.trl import WeightTransfer

MODEL = Path(__file__).parents[3] / "examples" / "seedling" / "model"
QUESTIONS = ["Compute 12+34.", "Compute 7*8.", "Compute 90-41.", "Compute 3*9+5."]
STEPS = 2


def main(url: str, folder: str) -> dict[str, Any]:
    rollouts = Rollouts(url)
    first = rollouts.status().weights_sequence
    trainer = AsyncDistillationTrainer(
        model=str(MODEL),
        args=AsyncDistillationConfig(
            output_dir=folder,
            vllm_server_base_url=url,
            teacher_server_urls={"default": url},
            teacher_top_k=8,
            max_inflight_tasks=4,
            token_budget=128,
            max_completion_length=16,
            temperature=1.5,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            model_init_kwargs={"attn_implementation": "eager", "dtype": "float32"},
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": question}] for question in QUESTIONS * STEPS]}
        ),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        weight_transfer=WeightTransfer(rollouts),
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    with Rollouts(url) as after:
        status = after.status()
    return {
        "log": log,
        "version": status.weights_version,
        "num_published": status.weights_sequence - first,
    }


if __name__ == "__main__":
    torch.cuda.get_device_name = lambda *_: "CPU"
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(main(sys.argv[1], place)))
