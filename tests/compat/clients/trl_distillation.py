"""TRL's server distillation trainer, with the server as its teacher."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.server_distillation import (
    ServerDistillationConfig,
    ServerDistillationTrainer,
)

MODEL = Path(__file__).parents[3] / "examples" / "seedling" / "model"
PROMPTS = ["Compute 12+34.\n", "Compute 7*8.\n"]
STEPS = 3


def student() -> Any:
    """The teacher's model with noise in its weights."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data += 0.2 * weight.std() * torch.randn_like(weight)
    return model


def main(url: str, folder: str, beta: float, top_k: int) -> dict[str, Any]:
    trainer = ServerDistillationTrainer(
        model=student(),
        args=ServerDistillationConfig(
            output_dir=folder,
            teacher_model_server_url=url,
            beta=beta,
            loss_top_k=top_k,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            max_completion_length=16,
            learning_rate=1e-4,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * STEPS}),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {name: [entry[name] for entry in log] for name in ("loss", "grad_norm")}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(
            json.dumps(
                {
                    "forward": main(sys.argv[1], place, beta=0.0, top_k=4),
                    "reverse": main(sys.argv[1], place, beta=1.0, top_k=1),
                }
            )
        )
