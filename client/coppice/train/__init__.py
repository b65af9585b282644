"""Exact policy gradients with one prefill per group instead of one per response."""

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

from coppice.train.attention.forward_contexts import UnsupportedModel
from coppice.train.attention.huggingface_models import attending
from coppice.train.backward import BackwardReport, Schedule, grouped_backward
from coppice.train.data_parallel import reduce_gradients
from coppice.train.group_logprobs import compute_prompt_kv, group_logprobs, packed_logprobs
from coppice.train.logit_adjustments import LogitAdjustments
from coppice.train.losses import (
    Clip,
    TokenWeights,
    Totals,
    advantages,
    dr_grpo,
    grpo_loss,
    kl_estimate,
    reverse_kl_loss,
    sequence_mean,
    token_mean,
)
from coppice.train.prompt_kv_leaves import PromptKV
from coppice.train.routing import replay_routing
from coppice.train.sampled_distribution import sampled_logprobs
from coppice.train.session_trees import Baseline, LeafId, SessionTree, session_trees
from coppice.train.training_group import LossFunction, RowLogprobs, TrainingGroup, TrainingTree

__all__ = [
    "BackwardReport",
    "Baseline",
    "Clip",
    "LeafId",
    "LogitAdjustments",
    "LossFunction",
    "PromptKV",
    "RowLogprobs",
    "Schedule",
    "SessionTree",
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
    "packed_logprobs",
    "reduce_gradients",
    "replay_routing",
    "reverse_kl_loss",
    "sampled_logprobs",
    "sequence_mean",
    "session_trees",
    "token_mean",
]
