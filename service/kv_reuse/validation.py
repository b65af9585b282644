"""Validation of prompt spans and of reuse options, and their defaults."""

from typing import Final

from coppice.wire.reuse import Reuse, ReuseMode
from coppice.wire.rollouts import Prompt, RolloutRequest
from service.http.errors import InvalidRequest
from service.kv_reuse.layout import PromptSpan

DEFAULT_FIRST_TOKENS = 16
DEFAULT_THRESHOLD = 0.3
APPROXIMATE_MODES: Final[tuple[ReuseMode, ...]] = ("recompute", "anchors")
REUSE_OFF = Reuse(mode="off")


def check(request: RolloutRequest) -> None:
    for group in request.groups:
        _check_names(group.prompt)
    reuse = request.reuse or REUSE_OFF
    if reuse.mode == "off":
        return
    if any(group.prompt.segments is None for group in request.groups):
        raise InvalidRequest("reuse needs prompts in segments")
    if request.continue_from is not None:
        raise InvalidRequest("continue_from goes on from a prompt as it was: reuse.mode is off")
    if reuse.mode in APPROXIMATE_MODES:
        _check_approximate(request, reuse.mode)


def _check_approximate(request: RolloutRequest, mode: ReuseMode) -> None:
    if request.kv is not None:
        raise InvalidRequest(
            f"reuse.mode {mode} makes approximate keys and values, which are not handed out: "
            "leave out kv, or reuse"
        )
    if request.adapter is not None:
        raise InvalidRequest("segments are kept for the model alone: reuse.mode is off or order")
    if request.branching is not None:
        raise InvalidRequest("a tree grows from an exact prompt: reuse.mode is off or order")


def _check_names(prompt: Prompt) -> None:
    seen: dict[str, list[int]] = {}
    for segment in prompt.segments or ():
        if segment.reuse is None:
            continue
        if seen.setdefault(segment.reuse, segment.token_ids) != segment.token_ids:
            raise InvalidRequest(f"the segment {segment.reuse!r} has two texts in one prompt")


def spans_of_prompt(prompt: Prompt) -> list[PromptSpan] | None:
    """Spans of a prompt; None if it is not given as spans."""
    if prompt.segments is None:
        return None
    return [PromptSpan(token_ids=span.token_ids, name=span.reuse) for span in prompt.segments]
