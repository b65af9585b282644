"""Generation with one server: one sample per prompt, and abort of all requests."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from coppice.client import AsyncRollouts
from coppice.errors import CoppiceError, Incomplete
from coppice.operations.pending import AsyncPending
from coppice.options import RolloutOptions
from coppice.results import Group
from coppice.samples import Sample
from coppice.verl.labels import global_steps
from coppice.verl.request_gate import RequestGate
from coppice.verl.sampling_options import LengthLimits, options_of

_REASONS = {"stop": "completed", "length": "completed"}
ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """Result of a request, with the field names of verl's TokenOutput."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Generation:
    """Requests to one server, used on one event loop; `close` closes its connections."""

    def __init__(self, rollouts: AsyncRollouts, length_limits: LengthLimits) -> None:
        self._rollouts = rollouts
        self._length_limits = length_limits
        self._gate = RequestGate()
        self._running: dict[AsyncPending, str] = {}

    async def generate(
        self, request_id: str, prompt: Sequence[int], params: Mapping[str, Any], priority: int = 0
    ) -> GenerationOutput:
        """Samples one response.

        An aborted request returns the tokens so far; a rejected one returns none.
        """
        options = options_of(params, self._length_limits, len(prompt))
        options["priority"] = priority
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
        """Aborts all requests and returns their ids.

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
        raise Incomplete("the engine failed at this sample")
    return GenerationOutput(
        token_ids=sample.token_ids.tolist(),
        log_probs=sample.logprobs.tolist() if with_logprobs else None,
        stop_reason=_REASONS.get(sample.finish_reason, ABORTED),
        extra_fields={**_steps(sample), "num_cached_tokens": group.num_cached_tokens},
    )


def _steps(sample: Sample) -> dict[str, int | None]:
    """Trainer steps of the weights; a sample spans several if weights changed during it."""
    steps = [global_steps(span.version) for span in sample.versions]
    known = [step for step in steps if step is not None]
    return {
        "global_steps": steps[-1] if steps else None,
        "min_global_steps": min(known, default=None),
        "max_global_steps": max(known, default=None),
    }
