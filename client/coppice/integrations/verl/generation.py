"""Client that sends verl's generation and logprob requests to one server, and aborts them."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coppice.client import AsyncRollouts
from coppice.errors import CoppiceError, Incomplete, Unsupported
from coppice.integrations.weights_version_labels import step_of
from coppice.operations.rollouts import AsyncPending
from coppice.rollout_options import RolloutOptions
from coppice.rollout_results import Group, Sample
from coppice.wire.columns.support import Support, SupportAnswer, joined_support, rows_of

_NO_PENALTIES = "reward repetition less, since verl's actor computes logprobs without penalties"
_ALTERNATIVES = {
    "repetition_penalty": _NO_PENALTIES,
    "presence_penalty": _NO_PENALTIES,
    "frequency_penalty": _NO_PENALTIES,
    "min_p": "use return_support, without which verl's logprobs are not those of the samples",
    "stop": "use stop_token_ids",
    "prompt_logprobs": "use max_tokens=1, as verl's teachers do",
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
_REASONS = {"stop": "completed", "length": "completed"}
ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """Maximum lengths, in tokens, of the prompt, the response, and the server's context."""

    prompt: int
    response: int
    context: int

    def max_tokens(self, params: int | None, num_prompt_tokens: int) -> int:
        """Maximum response length of one request, by the same rule as in verl's own rollouts."""
        room = self.context - num_prompt_tokens
        if room < 1:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens leaves no room for a response"
            )
        if params is None:
            params = min(self.response, self.prompt + self.response - num_prompt_tokens)
        return max(1, min(params, room))


def options_of(
    params: Mapping[str, Any],
    length_limits: LengthLimits,
    num_prompt_tokens: int,
    *,
    return_support: bool = False,
) -> RolloutOptions:
    """Options of a rollout with verl's sampling parameters."""
    names = (*_PASSED_THROUGH, "min_p") if return_support else _PASSED_THROUGH
    _refuse(params, {*_SUPPORTED, *names})
    given: dict[str, Any] = {name: params[name] for name in names if params.get(name) is not None}
    wanted = params.get("max_tokens", params.get("max_new_tokens"))
    options: RolloutOptions = {
        **given,  # type: ignore[typeddict-item]
        "top_k": max(params.get("top_k") or 0, 0),  # verl disables it with -1
        "max_tokens": length_limits.max_tokens(wanted, num_prompt_tokens),
    }
    return options


def _refuse(params: Mapping[str, Any], supported: Collection[str]) -> None:
    for name, value in params.items():
        if name in supported or value is None or value in _IGNORED_VALUES.get(name, ()):
            continue
        raise Unsupported(
            f"{name}={value!r} is not supported: {_ALTERNATIVES.get(name, 'omit it')}"
        )


class RequestGate:
    """Gate that, while shut, delays or rejects new requests to a server.

    It belongs to one event loop and is initially open.
    """

    def __init__(self) -> None:
        self._open = True
        self._rejecting = False
        self._state_changed = asyncio.Event()
        self._num_starting = 0
        self._none_starting = asyncio.Event()
        self._none_starting.set()

    async def admit(self) -> bool:
        """Waits while the gate is shut; returns whether the request may be submitted.

        After True the caller must call `admitted`. False means that the gate rejects requests.
        """
        while not self._open:
            if self._rejecting:
                return False
            await self._state_changed.wait()
        self._num_starting += 1
        self._none_starting.clear()
        return True

    def admitted(self) -> None:
        """Reports to the gate that an admitted request has been submitted, or has failed."""
        self._num_starting -= 1
        if self._num_starting == 0:
            self._none_starting.set()

    async def shut(self, *, reject: bool) -> None:
        """Shuts the gate and waits until no admitted request is still being submitted."""
        self._set_state(is_open=False, rejecting=reject)
        await self._none_starting.wait()

    def open(self) -> None:
        self._set_state(is_open=True, rejecting=False)

    def _set_state(self, *, is_open: bool, rejecting: bool) -> None:
        self._open, self._rejecting = is_open, rejecting
        state_changed, self._state_changed = self._state_changed, asyncio.Event()
        state_changed.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """Generated tokens of one request, with the field names of verl's TokenOutput."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Generation:
    """Sends verl's generation requests to one Coppice server, from one event loop.

    `close` closes the connections. With `return_support`, outputs have the supports of their tokens
    in `extra_fields`, in the form of the field `support` of a sample in the server's JSON.
    """

    def __init__(
        self, rollouts: AsyncRollouts, length_limits: LengthLimits, *, return_support: bool = False
    ) -> None:
        self._rollouts = rollouts
        self._length_limits = length_limits
        self._return_support = return_support
        self._gate = RequestGate()
        self._running: dict[AsyncPending, str] = {}

    async def generate(
        self, request_id: str, prompt: Sequence[int], params: Mapping[str, Any], priority: int = 0
    ) -> GenerationOutput:
        """Samples one response to a prompt.

        An aborted request returns the tokens so far; a rejected one returns none. A request for one
        token and for prompt logprobs, as verl's teachers get it, is only scored.
        """
        num_top = params.get("prompt_logprobs")
        if num_top is not None and params.get("max_tokens") == 1:
            return await self.score(prompt, num_top)
        with_support = self._return_support
        options = options_of(params, self._length_limits, len(prompt), return_support=with_support)
        options["priority"] = priority
        options["return_support"] = with_support
        if not await self._gate.admit():
            return GenerationOutput(token_ids=[], log_probs=None, stop_reason=ABORTED)
        pending = await self._submit(request_id, prompt, options)
        try:
            result = await pending.wait()
        except BaseException:
            with suppress(CoppiceError):
                await pending.abort()
            raise
        finally:
            del self._running[pending]
        return _to_output(result.groups[0], with_logprobs=bool(params.get("logprobs")))

    async def score(self, sequence: Sequence[int], num_top: int) -> GenerationOutput:
        """Logprobs of a sequence's tokens, or of the most probable tokens at their positions.

        `prompt_ids` and `prompt_logprobs` have one row per token, for the token after it. The last
        row is padding.
        """
        item = (list(sequence[:1]), [list(sequence[1:])])
        [score] = await self._rollouts.score([item], top_logprobs=num_top or None)
        ids, logprobs = np.array(item[1]).T, score.logprobs[0][:, None]
        if num_top:
            assert score.top_logprobs is not None, "the server returns the requested top logprobs"
            ids, logprobs = score.top_logprobs[0].padded()
        padding = ((0, 1), (0, 0))
        fields = {"prompt_ids": np.pad(ids, padding), "prompt_logprobs": np.pad(logprobs, padding)}
        return GenerationOutput(
            token_ids=[], log_probs=None, stop_reason="completed", extra_fields=fields
        )

    async def _submit(
        self, request_id: str, prompt: Sequence[int], options: RolloutOptions
    ) -> AsyncPending:
        try:
            pending = await self._rollouts.submit([list(prompt)], **options)
            self._running[pending] = request_id
        finally:
            self._gate.admitted()
        return pending

    async def abort_all(self, *, reject: bool) -> list[str]:
        """Aborts all running requests and returns their ids.

        New requests wait, or are rejected, until `resume`.
        """
        await self._gate.shut(reject=reject)
        running = dict(self._running)
        await asyncio.gather(*(pending.abort() for pending in running))
        return list(running.values())

    def resume(self) -> None:
        self._gate.open()

    async def close(self) -> None:
        await self._rollouts.aclose()


def _to_output(group: Group, *, with_logprobs: bool) -> GenerationOutput:
    [sample] = group.samples
    if sample.finish_reason == "error":
        raise Incomplete("the engine failed while generating this sample")
    extra_fields: dict[str, Any] = {
        **_steps(sample),
        "num_cached_tokens": group.num_cached_tokens,
    }
    if sample.support is not None:
        # verl stores it in NumPy arrays of objects, which split sequences.
        extra_fields["support"] = sample.support.to_wire().model_dump()
    return GenerationOutput(
        token_ids=sample.token_ids.tolist(),
        log_probs=sample.logprobs.tolist() if with_logprobs else None,
        stop_reason=_REASONS.get(sample.finish_reason, ABORTED),
        extra_fields=extra_fields,
    )


def support_of(field: Mapping[str, Any]) -> Support:
    """Supports of an output, from `extra_fields`."""
    answer = SupportAnswer.model_validate(field)
    return Support(tuple(rows_of(answer)), answer.vocab_size)


def join_outputs(fields: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Supports of a response that was generated in parts; None if a part has none."""
    whole = joined_support([support_of(field) for field in fields])
    return None if whole is None else whole.to_wire().model_dump()


def _steps(sample: Sample) -> dict[str, int | None]:
    """Last, lowest and highest trainer step of the weights that generated a sample."""
    steps = [step_of(span.version) for span in sample.versions]
    known = [step for step in steps if step is not None]
    return {
        "global_steps": steps[-1] if steps else None,
        "min_global_steps": min(known, default=None),
        "max_global_steps": max(known, default=None),
    }
