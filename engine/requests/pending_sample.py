"""Awaitable of a running vLLM request, and its output as a completion of the engine interface."""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from engine.errors import EngineDead, SupportLost
from engine.kv_lifetime import version_spans
from engine.requests.logprob_arrays import LogprobChunks
from engine.requests.logprobs import (
    sampled_logprobs,
    top_k_entropies,
)
from engine.requests.request_params import requested_logprobs
from engine.sampling.step_supports import rows_of
from engine.types.samples import Completion, SampleRequest, TokenDelta, TopLogprobRows, VersionSpan


class PendingSample:
    """Awaitable of a running sample. Unlike a coroutine, it may be dropped without being awaited.

    `on_finished` receives the completion, including the top k tokens if they were recorded.
    """

    def __init__(
        self,
        queue: Any,
        sample: SampleRequest,
        on_finished: Callable[[Completion], None] | None = None,
    ) -> None:
        self._queue = queue
        self._sample = sample
        self._has_ended = False
        self._on_finished = on_finished

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._completion().__await__()

    async def _completion(self) -> Completion:
        try:
            output = await self._queue.get()
        except EngineDeadError as error:
            raise EngineDead("the engine process died") from error
        found = to_completion(output, self._sample)
        if self._on_finished is not None:
            self._on_finished(
                replace(found, top_logprobs=_recorded_rows(output.outputs[0].logprobs))
            )
        return found

    def deliver(self, state: Any, output: Any, version: str | None) -> None:
        """Pass the tokens of a running request's output to `on_tokens`; see `held_outputs.attach`.

        An exception of `on_tokens` ends the sample, and leaves other requests alone.
        """
        if self._has_ended or not output.new_token_ids:
            return
        try:
            self._deliver(state, output, version)
        except Exception as error:  # its own sample raises it
            self._has_ended = True
            self._queue.put(error)

    def _deliver(self, state: Any, output: Any, version: str | None) -> None:
        sample, number = self._sample, len(output.new_token_ids)
        logprobs, rows = [math.nan] * number, None
        if sample.returns_logprobs:
            rows = state.logprobs_processor.logprobs.latest
            logprobs = rows.logprobs[:, 0].tolist()
            if (num_possible := _num_possible(logprobs)) < number:
                self._has_ended, rows = True, rows[:num_possible]
                if not num_possible:
                    return
        start = state.detokenizer.num_output_tokens() - number
        end = start + (number if rows is None else len(rows))
        assert sample.on_tokens is not None, "the sample is delivered while it runs"
        sample.on_tokens(
            TokenDelta(
                start=start,
                token_ids=output.new_token_ids[: end - start],
                logprobs=logprobs[: end - start],
                versions=(VersionSpan(version=version, start=start, end=end),) if version else (),
                top_logprobs=_top_logprobs(rows, sample),
                text=state.detokenizer.get_next_output_text(finished=False, delta=True)
                if sample.returns_text
                else None,
                num_cached_tokens=state.num_cached_tokens,
            )
        )


def _recorded_rows(logprobs: LogprobChunks | None) -> TopLogprobRows | None:
    """Top logprobs of a sample, if vLLM returned any for whatever purpose."""
    rows = None if logprobs is None else logprobs.rows()
    return None if rows is None or rows.token_ids.shape[1] == 1 else rows


def _top_logprobs(rows: TopLogprobRows | None, request: SampleRequest) -> TopLogprobRows | None:
    """Top logprobs of the sampled distribution, if requested."""
    k = 0 if request.raw_logprobs else request.num_top_logprobs
    return rows.columns(k) if k and rows is not None else None


def to_completion(output: RequestOutput, request: SampleRequest) -> Completion:
    sample, k = output.outputs[0], request.entropy_top_k
    rows = _recorded_rows(sample.logprobs)
    versions = tuple(
        VersionSpan(version=span.version, start=span.start, end=span.end)
        for span in sample.weight_versions or ()
    )
    completion = Completion(
        token_ids=list(sample.token_ids),
        logprobs=sampled_logprobs(sample.logprobs)
        if request.returns_logprobs
        else [math.nan] * len(sample.token_ids),
        finish=sample.finish_reason,
        versions=versions,
        kv_versions=version_spans.kv_version_spans(
            version_spans.reports_of(output), versions, len(request.prompt_token_ids)
        ),
        num_cached_tokens=output.num_cached_tokens or 0,
        stop_reason=sample.stop_reason,
        text=sample.text if request.returns_text else None,
        entropy=top_k_entropies(rows, k) if k and rows is not None else None,
        top_logprobs=_top_logprobs(rows, request),
        routed_experts=sample.routed_experts,
    )
    replayed = replace(completion, **_replayed(sample, request))
    if not request.returns_logprobs:
        return replayed
    return _possible_part(replayed, len(request.prompt_token_ids))


def _num_possible(logprobs: Sequence[float]) -> int:
    """Number of tokens before the first one whose logprob is NaN."""
    if not math.isnan(sum(logprobs)):
        return len(logprobs)
    return next(n for n, logprob in enumerate(logprobs) if math.isnan(logprob))


def _possible_part(found: Completion, num_prompt_tokens: int) -> Completion:
    """The completion up to a position with NaN logits, or where its constraints exclude all tokens.

    vLLM samples an arbitrary token there, with the logprob NaN.
    """
    length = len(found.token_ids)
    given = [values for values in (found.logprobs, found.raw_logprobs) if values]
    end = min(map(_num_possible, given), default=length)
    if end == length:
        return found
    experts = found.routed_experts
    return replace(
        found,
        **found.first(end),
        finish="error",
        stop_reason=None,
        versions=_spans_between(found.versions, 0, end),
        kv_versions=version_spans.cut_kv_versions(found.kv_versions, num_prompt_tokens, end),
        routed_experts=None if experts is None else experts[: len(experts) - (length - end)],
    )


def _spans_between(spans: Sequence[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(version=span.version, start=max(span.start, start), end=min(span.end, end))
        for span in spans
        if span.start < end and span.end > start
    )


def _replayed(sample: Any, request: SampleRequest) -> dict[str, Any]:
    """Fields of a completion that the hooks of the sampler return: supports and logprobs.

    Raises SupportLost if the engine lacks those of a token.
    """
    further = requested_logprobs(request)
    if not (request.support or further.width):
        return {}
    rows = rows_of(sample.sampling_mask or ())
    if len(rows) != len(sample.token_ids) or not all(map(further.fits, rows)):
        raise SupportLost(f"{len(rows)} supports for {len(sample.token_ids)} tokens")
    found, token_ids = further.split(rows), np.array(sample.token_ids, np.int32)
    given = np.tile(np.array(further.given, np.int32), (len(rows), 1))
    fields: dict[str, Any] = {"support": found.supports if request.support else None}
    if further.given:
        fields["given_logprobs"] = _table(token_ids, given, found.given)
    if found.raw is not None:
        fields["raw_logprobs"] = found.raw.tolist()
    if further.num_raw:
        fields["top_logprobs"] = _table(token_ids, found.raw_top_ids, found.raw_top)
    return fields


def _table(
    sampled: NDArray[np.int32], token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> TopLogprobRows:
    """Logprobs of further tokens; the sampled ones are in column 0 without a logprob."""
    return TopLogprobRows(
        np.column_stack([sampled, token_ids]),
        np.pad(logprobs, ((0, 0), (1, 0)), constant_values=-np.inf),
        np.zeros(len(sampled), np.int64),
    )
