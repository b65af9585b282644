"""GRPO with TRL's trainer: through `rollout_func`, with an adapter, and in server mode."""

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from coppice import Rollouts
from coppice.integrations.trl import RolloutFunc, SupportReplay, install, rollout_func
from examples.seedling.arithmetic import reward

MODEL = Path(__file__).parents[3] / "examples" / "seedling" / "model"
PROMPTS = ["Compute 12+34.\n", "Compute 7*8.\n"]
STEPS = 2
SAMPLES = 4


def rewards(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Distinct within a group; equal rewards would give no gradient."""
    pairs = enumerate(zip(prompts, completions, strict=True))
    return [reward(prompt, completion) + 0.1 * (i % SAMPLES) for i, (prompt, completion) in pairs]


def trained(folder: str, **route: Any) -> Any:
    config = {"use_vllm": False, **route.pop("config", {})}
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    trainer = route.pop("trainer_class", GRPOTrainer)(
        model=model,
        reward_funcs=[rewards],
        args=GRPOConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=len(PROMPTS) * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=16,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,  # as on this server, whose logprobs are compared with the trainer's
            **config,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * STEPS}),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        **route,
    )
    trainer.train()
    return trainer


def training_summary(
    rollouts: Rollouts, trainer: Any, adapter: str | None = None
) -> dict[str, Any]:
    """The served version, and how often versions changed in the meantime."""
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    score = rollouts.score([(PROMPTS[0], [[5, 6, 7]])], adapter=adapter)
    return {
        "version": rollouts.status().weights_version,
        "sequence": rollouts.status().weights_sequence,
        "grad_norms": [entry["grad_norm"] for entry in log],
        "lengths": [entry["completions/mean_length"] for entry in log],
        "ratios": [entry.get("sampling/importance_sampling_ratio/mean") for entry in log],
        "scores": list(map(float, score[0].logprobs[0])),
    }


def adapted(folder: str, rollouts: Rollouts) -> dict[str, Any]:
    """The version served under the adapter, which is unloaded afterwards."""
    known = {loaded.name for loaded in rollouts.adapters().adapters}
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trained(folder, rollout_func=rollout_func(rollouts), peft_config=config)
    [ours] = [loaded for loaded in rollouts.adapters().adapters if loaded.name not in known]
    answer = training_summary(rollouts, trainer, ours.name)
    rollouts.unload_adapter(ours.name)
    return {**answer, "adapter": ours.version}


class RecordedFunc(RolloutFunc):
    """Keeps the served logprobs by the token ids of prompt and completion."""

    served: dict[tuple[int, ...], list[float]]

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        output = super().__call__(prompts, trainer)
        rows = zip(*(output[name] for name in ("prompt_ids", "completion_ids")), strict=True)
        names = [(*prompt, *completion) for prompt, completion in rows]
        self.served = dict(zip(names, output["logprobs"], strict=True))
        return output


class ReplayTrainer(SupportReplay, GRPOTrainer):  # type: ignore[misc]
    """Records the importance ratios of all tokens that it trains on."""

    rollout_func: RecordedFunc

    def _replayed(
        self, model: Any, input_ids: Any, attention_mask: Any, num_kept: int, *, with_entropy: bool
    ) -> tuple[Any, Any]:
        found = super()._replayed(
            model, input_ids, attention_mask, num_kept, with_entropy=with_entropy
        )
        self.ratios = self.__dict__.get("ratios", [])
        for ids, mask, logprobs in zip(input_ids, attention_mask.bool(), found[0], strict=True):
            served = self.rollout_func.served[tuple(ids[mask].tolist())]
            pairs = zip(logprobs.tolist(), served, strict=False)
            self.ratios += [math.exp(ours - theirs) for ours, theirs in pairs]
        return found


def replayed(folder: str, rollouts: Rollouts) -> dict[str, Any]:
    """Truncated samples, with the trainer's logprobs over their supports."""
    route = RecordedFunc(rollouts, return_support=True)
    # At temperature 1 nearly all supports are a single token, which has no gradient.
    config = {
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "temperature": 2.0,
    }
    trainer = trained(folder, rollout_func=route, trainer_class=ReplayTrainer, config=config)
    ratios = [min(trainer.ratios), max(trainer.ratios), float(len(trainer.ratios))]
    return {**training_summary(rollouts, trainer), "token_ratios": ratios}


def runs(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder, Rollouts(url) as rollouts:
        yield "adapter", adapted(folder, rollouts)  # while the base weights equal the trainer's
        yield (
            "rollout_func",
            training_summary(rollouts, trained(folder, rollout_func=rollout_func(rollouts))),
        )
        yield "support", replayed(folder, rollouts)
        install()
        install()
        config = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
        yield "server_mode", training_summary(rollouts, trained(folder, config=config))


if __name__ == "__main__":
    print(json.dumps(dict(runs(sys.argv[1]))))
