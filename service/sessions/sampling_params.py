"""Sampling parameters of an agent's call, merged from its session and its request."""

from collections.abc import Sequence

from coppice.wire.sampling import Sampling
from service.errors import InvalidRequest


def merge_sampling(
    given: Sampling, requested: Sampling, overrides: Sequence[str]
) -> tuple[Sampling, int]:
    """Sampling parameters of a call, and the number of the agent's that are replaced.

    `given` are those of the session. Agents send sampling parameters that nobody can configure, so
    they are replaced without an error. Structured outputs are refused instead: an agent that
    requests them relies on them. The session's `max_tokens` is an upper limit. Fields that the
    request sets to their default are the agent's, too.
    """
    chosen = requested.model_fields_set
    update = {name: getattr(requested, name) for name in chosen if name in overrides}
    if "structured_outputs" in chosen and "structured_outputs" not in overrides:
        raise InvalidRequest.of_parameter(
            "structured_outputs",
            "the session does not allow response formats and forced tool calls: create it with "
            "structured_outputs in overrides",
        )
    if given.max_tokens is not None and "max_tokens" in update:
        update["max_tokens"] = min(given.max_tokens, update["max_tokens"])
    sampling = given.model_copy(update=update)
    num_replaced = sum(
        getattr(sampling, name) != getattr(requested, name)
        for name in chosen
        if name not in overrides
    )
    return sampling, num_replaced


def limited(sampling: Sampling, num_tokens_left: int) -> Sampling:
    """The same parameters with at most the given number of tokens."""
    max_tokens = min(sampling.max_tokens or num_tokens_left, num_tokens_left)
    min_tokens = min(sampling.min_tokens, max_tokens)
    return sampling.model_copy(update={"max_tokens": max_tokens, "min_tokens": min_tokens})
