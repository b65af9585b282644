"""Methods of vLLM's worker class for shared-prefix attention. They never raise."""

from typing import Any

from engine.attention import register
from engine.runtime.feature_guard import Failure, attempt
from engine.types.feature_stats import AttentionState


def coppice_attention_state(self: Any) -> AttentionState:
    """State of shared-prefix attention, once the model is loaded."""
    state = attempt(register.state, self.model_runner)
    return "failed" if isinstance(state, Failure) else state
