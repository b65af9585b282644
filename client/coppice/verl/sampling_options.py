"""What verl says of sampling, as the options of a rollout."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coppice.errors import Unsupported
from coppice.options import RolloutOptions

_INSTEAD = {
    "repetition_penalty": "reward repetition less",
    "presence_penalty": "reward repetition less",
    "frequency_penalty": "reward repetition less",
    "min_p": "use top_p or top_k",
    "stop": "use stop_token_ids",
    "prompt_logprobs": "ask the server's POST /v1/score",
}
# At these nothing is asked for. None is neutral for every name.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_p": (0,),
    "stop": ([], ""),
    "detokenize": (True, False),
    "skip_special_tokens": (True, False),
}
_SAME = ("temperature", "top_p", "seed", "ignore_eos", "stop_token_ids")
_OURS = frozenset({*_SAME, "top_k", "logprobs", "max_tokens", "max_new_tokens"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of a prompt, of a response, and of both in the server, in tokens."""

    prompt: int
    response: int
    context: int

    def max_tokens(self, asked: int | None, num_prompt_tokens: int) -> int:
        """As verl's own rollouts bound a response."""
        room = self.context - num_prompt_tokens
        if room < 1:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens leaves no room for a response"
            )
        if asked is None:
            asked = min(self.response, self.prompt + self.response - num_prompt_tokens)
        return max(1, min(asked, room))


def options_of(
    asked: Mapping[str, Any], lengths: Lengths, num_prompt_tokens: int
) -> RolloutOptions:
    _refuse(asked)
    given: dict[str, Any] = {name: asked[name] for name in _SAME if asked.get(name) is not None}
    wanted = asked.get("max_tokens", asked.get("max_new_tokens"))
    options: RolloutOptions = {
        **given,  # type: ignore[typeddict-item]
        "top_k": max(asked.get("top_k") or 0, 0),  # verl's -1 is none
        "max_tokens": lengths.max_tokens(wanted, num_prompt_tokens),
    }
    return options


def _refuse(asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        if name in _OURS or value is None or value in _NEUTRAL.get(name, ()):
            continue
        raise Unsupported(
            f"{name}={value!r} is not sampled with: {_INSTEAD.get(name, 'leave it out')}"
        )
