"""Helpers for fields in answers of several APIs: model, finish reason, versions, token counts."""

import time
from typing import Any

from coppice.wire.rollouts import RolloutAnswer, SampleAnswer
from service.server import Server


def name_of(server: Server, model: str | None) -> str:
    """Model name to put in a response: as requested, but the served name for the model's path."""
    info = server.engine.info
    return info.model if model is None or model == info.model_given else model


def finish_reason(sample: SampleAnswer) -> str:
    """Finish reason as in vLLM, where every early end of a sample is `abort`."""
    reason = sample.finish_reason
    return reason if reason in ("stop", "length", "error") else "abort"


def support_field(sample: SampleAnswer) -> dict[str, Any]:
    """Field `support` of a finished sample, as in answers of /v1/rollouts; empty if it has none."""
    return {} if sample.support is None else {"support": sample.support.model_dump()}


def weight_version_spans(sample: SampleAnswer) -> list[dict[str, Any]]:
    """Ranges of a sample's tokens as JSON, each with the weights version that generated it."""
    return [span.model_dump() for span in sample.versions]


def usage(answer: RolloutAnswer) -> dict[str, Any]:
    usage_totals = answer.usage
    return {
        **token_counts(usage_totals.num_prompt_tokens, usage_totals.num_generated_tokens),
        "prompt_tokens_details": {
            "cached_tokens": sum(group.num_cached_tokens for group in answer.groups)
        },
    }


def token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def unix_time() -> int:
    """Current Unix time in seconds, for the field `created`."""
    return int(time.time())
