"""Exact policy gradients with one prefill per prompt group."""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "transformers"):
        raise
    raise ModuleNotFoundError(
        f"coppice.train needs {missing.name}: pip install 'coppice-client[train]'",
        name=missing.name,
    ) from None

from coppice.train.attention_contexts import UnsupportedModel
from coppice.train.backward import BackwardReport, grouped_backward
from coppice.train.distributed import reduce_gradients
from coppice.train.gradient_schedules import Schedule
from coppice.train.groups import TrainingGroup
from coppice.train.hf_attention import attending
from coppice.train.logprobs import compute_prompt_kv, group_logprobs, packed_logprobs
from coppice.train.losses import Clip, advantages, grpo_loss, kl_estimate
from coppice.train.naive import naive_backward, naive_logprobs
from coppice.train.normalizers import TokenWeights, Totals, dr_grpo, sequence_mean, token_mean
from coppice.train.prompt_kv import PromptKV
from coppice.train.rows import LossFunction, RowLogprobs
from coppice.train.tree import TrainingTree

__all__ = [
    "BackwardReport",
    "Clip",
    "LossFunction",
    "PromptKV",
    "RowLogprobs",
    "Schedule",
    "TokenWeights",
    "Totals",
    "TrainingGroup",
    "TrainingTree",
    "UnsupportedModel",
    "advantages",
    "attending",
    "compute_prompt_kv",
    "dr_grpo",
    "group_logprobs",
    "grouped_backward",
    "grpo_loss",
    "kl_estimate",
    "naive_backward",
    "naive_logprobs",
    "packed_logprobs",
    "reduce_gradients",
    "sequence_mean",
    "token_mean",
]
