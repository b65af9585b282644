"""Conversion of verl's sampling parameters to rollout options."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coppice.errors import Unsupported
from coppice.options import RolloutOptions

_ALTERNATIVES = {
    "repetition_penalty": "reward repetition less",
    "presence_penalty": "reward repetition less",
    "frequency_penalty": "reward repetition less",
    "min_p": "use top_p or top_k",
    "stop": "use stop_token_ids",
    "prompt_logprobs": "ask the server's POST /v1/score",
}
# Values without effect. None is without effect for every name.
_IGNORED_VALUES: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_p": (0,),
    "stop": ([], ""),
    "detokenize": (True, False),
    "skip_special_tokens": (True, False),
}
_PASSED_THROUGH = ("temperature", "top_p", "seed", "ignore_eos", "stop_token_ids")
_SUPPORTED = frozenset({*_PASSED_THROUGH, "top_k", "logprobs", "max_tokens", "max_new_tokens"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """Limits in tokens: prompt, response, and the server's context."""

    prompt: int
    response: int
    context: int

    def max_tokens(self, params: int | None, num_prompt_tokens: int) -> int:
        """Response limit, by the same rule as in verl's own rollouts."""
        room = self.context - num_prompt_tokens
        if room < 1:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens leaves no room for a response"
            )
        if params is None:
            params = min(self.response, self.prompt + self.response - num_prompt_tokens)
        return max(1, min(params, room))


def options_of(
    params: Mapping[str, Any], length_limits: LengthLimits, num_prompt_tokens: int
) -> RolloutOptions:
    _refuse(params)
    given: dict[str, Any] = {
        name: params[name] for name in _PASSED_THROUGH if params.get(name) is not None
    }
    wanted = params.get("max_tokens", params.get("max_new_tokens"))
    options: RolloutOptions = {
        **given,  # type: ignore[typeddict-item]
        "top_k": max(params.get("top_k") or 0, 0),  # verl disables it with -1
        "max_tokens": length_limits.max_tokens(wanted, num_prompt_tokens),
    }
    return options


def _refuse(params: Mapping[str, Any]) -> None:
    for name, value in params.items():
        if name in _SUPPORTED or value is None or value in _IGNORED_VALUES.get(name, ()):
            continue
        raise Unsupported(
            f"{name}={value!r} is not sampled with: {_ALTERNATIVES.get(name, 'leave it out')}"
        )
