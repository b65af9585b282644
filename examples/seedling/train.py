"""Trains the seedling, a small test model that does arithmetic, from scratch.

One seeded run on a CPU, float32 weights under bfloat16 autocast. Muon trains the hidden matrices,
AdamW the embedding and the norms.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from examples.seedling import batches, tokenizer

SEED = 7
NUM_STEPS = 1500
WARMUP_STEPS = 50
TOKENS_PER_BATCH = 4096
AT_ONCE_SHARE = 0.2
LEARNING_RATE = 4e-3
LOG_EVERY_STEPS = 50


def config(words: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(words),
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=tokenizer.MAX_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )


def optimizers(model: Qwen3ForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    hidden = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in hidden}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(
            hidden, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Learning rate, relative to its maximum: linear warm-up, then linear decay to zero."""
    return min((step + 1) / WARMUP_STEPS, (num_steps - step) / num_steps)


def loss_of(model: Qwen3ForCausalLM, batch: batches.Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch.tokens_BT, use_cache=False).logits
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).float(),
        batch.labels_BT[:, 1:].flatten(),
        ignore_index=batches.IGNORED,
    )


def train(
    model: Qwen3ForCausalLM, stream: Iterator[batches.Batch], num_steps: int, learning_rate: float
) -> None:
    opts = optimizers(model, learning_rate)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: learning_rate_factor(step, num_steps))
        for o in opts
    ]
    started, recent = time.monotonic(), 0.0
    for step, batch in zip(range(1, num_steps + 1), stream, strict=False):
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt, schedule in zip(opts, schedules, strict=True):
            opt.step()
            opt.zero_grad()
            schedule.step()
        recent += loss.item()
        if step % LOG_EVERY_STEPS == 0:
            minutes = (time.monotonic() - started) / 60
            mean_loss = recent / LOG_EVERY_STEPS
            print(f"step {step}  loss {mean_loss:.3f}  {minutes:.1f} min", flush=True)
            recent = 0.0


def save(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, out: Path) -> None:
    # The defaults are explicit, because transformers would otherwise apply top_k=50.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    words.save_pretrained(out)
    # transformers 4 does not know the class name that transformers 5 writes; both know this one.
    path = out / "tokenizer_config.json"
    saved = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(saved, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the seedling.")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--start", type=Path, help="model to continue from; default: from scratch")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--at-once-share", type=float, default=AT_ONCE_SHARE)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    words = tokenizer.build()
    if args.start:
        model = Qwen3ForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    else:
        model = Qwen3ForCausalLM(config(words))
    stream = batches.stream(
        words,
        seed=SEED,
        tokens_per_batch=TOKENS_PER_BATCH,
        at_once_share=args.at_once_share,
    )
    train(model.train(), stream, args.steps, args.learning_rate)
    save(model, words, args.out)


if __name__ == "__main__":
    main()
