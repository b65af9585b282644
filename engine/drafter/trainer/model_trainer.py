"""Training step, loss and checkpoints of the draft model (Hugging Face, float32, one thread).

The targets are the next tokens of responses or their distributions (`compute_loss`). Parameters
that are not trained (see `TrainedParameters`) are neither changed nor saved: a checkpoint holds the
trained tensors, their optimizer state and the training progress.
"""

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import log_softmax, nll_loss
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from engine.drafter.trainer.packing import IGNORE_INDEX, PackedBatch

SMOOTHING: Final = 0.02
WINDOW_STEPS: Final = 500
COMPARED_STEPS: Final = 100
"""Steps at each end of the window whose mean losses are compared."""
MIN_RELATIVE_CHANGE: Final = 0.05
"""Relative change of the loss above which training has not converged.

The loss rises after a change of weights, and falls while there is more to learn.
"""


class LossTracker:
    """Smoothed training loss and detection of convergence.

    `smoothed` is the mean of about the last 50 losses, or of all so far.
    """

    def __init__(self, *, num_steps: int = 0, smoothed: float = 0.0) -> None:
        self.num_steps = num_steps
        self.smoothed = smoothed
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)

    def update(self, loss: float) -> None:
        self.num_steps += 1
        self.smoothed += max(SMOOTHING, 1 / self.num_steps) * (loss - self.smoothed)
        self._losses.append(loss)

    @property
    def has_converged(self) -> bool:
        """True if the training loss neither rose nor fell in the last WINDOW_STEPS steps."""
        if len(self._losses) < WINDOW_STEPS:
            return False
        losses = list(self._losses)
        before, now = fmean(losses[:COMPARED_STEPS]), fmean(losses[-COMPARED_STEPS:])
        return abs(now - before) <= MIN_RELATIVE_CHANGE * before


MIN_REMAINDER: Final = 1e-6
"""Minimum probability of the other tokens; smaller values are below the resolution of float32."""


def compute_loss(logits_TV: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
    """Mean cross-entropy over response tokens, against sampled tokens or recorded distributions.

    Without a recorded distribution, the target is the sampled token. With one, the target is the
    probability of each top-k token in the served distribution, with one further outcome for all
    other tokens. The expected value of the former loss over sampled tokens equals the latter,
    except within the "other" outcome; the latter has no sampling noise.

    Shape suffixes: T tokens of the row, V vocabulary, R positions with recorded top-k tokens, K of
    them.
    """
    logs_TV = log_softmax(logits_TV, dim=-1)
    losses_T = nll_loss(logs_TV, packed.labels_T, ignore_index=IGNORE_INDEX, reduction="none")
    if packed.soft_targets is not None:
        positions_R, tokens_RK, probs_RK = packed.soft_targets
        losses_R = _soft_cross_entropy(logs_TV[positions_R[:, None], tokens_RK], probs_RK)
        losses_T = losses_T.index_copy(0, positions_R, losses_R)
    return losses_T.sum() / (packed.labels_T != IGNORE_INDEX).sum()


def _soft_cross_entropy(logs_RK: torch.Tensor, probs_RK: torch.Tensor) -> torch.Tensor:
    remainder_R = (1 - (logs_RK.exp() * (probs_RK > 0)).sum(-1)).clamp(min=MIN_REMAINDER)
    other_prob_R = (1 - probs_RK.sum(-1)).clamp(min=0)
    return -(probs_RK * logs_RK).sum(-1) - other_prob_R * remainder_R.log()


WARMUP_STEPS: Final = 20
MAX_LEARNING_RATE: Final = 3e-3
LEARNING_RATE_TIMES_WIDTH: Final = 0.2
"""Wide models need small steps: 3e-3 at 64 channels, 2e-4 at 1024."""


class ModelTrainer:
    """Model and optimizer of a drafter in training."""

    def __init__(self, folder: Path) -> None:
        """Load the initial drafter from config.json and model.safetensors in `folder`."""
        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.train()
        self._parameters = dict(self._model.named_parameters())
        self._reset_optimizer()
        self.num_steps = 0
        self.num_tokens = 0

    def _reset_optimizer(self) -> None:
        width = self._model.config.hidden_size
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        self.loss_tracker = LossTracker()
        self._learning_rate = min(MAX_LEARNING_RATE, LEARNING_RATE_TIMES_WIDTH / width)
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=self._learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, packed: PackedBatch) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * min(
                1.0, (self.loss_tracker.num_steps + 1) / WARMUP_STEPS
            )
        loss = self.compute_loss(packed)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_steps += 1
        self.num_tokens += int((packed.labels_T != IGNORE_INDEX).sum())
        self.loss_tracker.update(loss.item())

    def compute_loss(self, packed: PackedBatch) -> torch.Tensor:
        """Loss of a row of packed samples, each of which attends only to itself."""
        attention_bias = torch.zeros(packed.mask_TT().shape).masked_fill(
            ~packed.mask_TT(), torch.finfo(torch.float32).min
        )
        logits = self._model(
            input_ids=packed.tokens_T[None],
            position_ids=packed.positions_T[None],
            attention_mask=attention_bias[None, None],
            use_cache=False,
        ).logits[0]
        return compute_loss(logits, packed)

    def adopt(self, file: Path) -> None:
        """Continue training from the weights in a file, with a new optimizer state."""
        own = dict(self._model.named_parameters())
        self._copy_weights({name: value for name, value in load_file(file).items() if name in own})
        self._reset_optimizer()

    def write_drafter(self, file: Path) -> None:
        """Write the drafter's weights to a file that vLLM loads, atomically."""
        tied = bool(getattr(self._model.config, "tie_word_embeddings", False))
        state = {
            name: tensor.detach().contiguous()
            for name, tensor in self._model.state_dict().items()
            if not (tied and name == "lm_head.weight")
        }
        _save_atomically(file, state, {"format": "pt"})

    # Checkpoints

    def save(self, file: Path) -> None:
        tensors = {f"value.{name}": value.detach() for name, value in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{kind}.{name}"] = value.reshape(value.shape)
        progress = {
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "loss_tracker": {
                "num_steps": self.loss_tracker.num_steps,
                "smoothed": self.loss_tracker.smoothed,
            },
        }
        _save_atomically(file, tensors, {"progress": json.dumps(progress)})

    def resume(self, file: Path) -> bool:
        """Load a training checkpoint, and return whether it exists and fits this drafter."""
        try:
            with safe_open(file, framework="pt") as saved:
                progress = json.loads((saved.metadata() or {})["progress"])
                loss_tracker = LossTracker(**progress["loss_tracker"])
                tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
            values = _with_prefix(tensors, "value.")
            if values.keys() != self._parameters.keys():
                return False
            self._copy_weights(values)
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError):
            return False
        for name, parameter in self._parameters.items():
            known = {
                kind: tensors[f"{kind}.{name}"]
                for kind in ("step", "exp_avg", "exp_avg_sq")
                if f"{kind}.{name}" in tensors
            }
            if known:
                self._optimizer.state[parameter] = known
        self.num_steps, self.num_tokens = progress["num_steps"], progress["num_tokens"]
        self.loss_tracker = loss_tracker
        return True

    def _copy_weights(self, values: Mapping[str, torch.Tensor]) -> None:
        own = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)


def _with_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _save_atomically(
    file: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    """Write and fsync under another name, then rename: readers see the old file or the new one."""
    part = file.with_suffix(".part")
    save_file(dict(tensors), part, metadata=metadata)
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.replace(file)
