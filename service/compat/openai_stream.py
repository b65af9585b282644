"""Streams of server-sent events in OpenAI's format."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from coppice.wire.problem_catalogue import Problem
from coppice.wire.result_formats import EndRecord, ProgressRecord, SampleRecord
from coppice.wire.rollouts import SampleAnswer
from service.compat.bodies import CompatModel, Flag
from service.compat.compat_request import ROLLOUT_ERRORS, token_counts, usage
from service.compat.openai_errors import as_openai, with_openai_error
from service.http.errors import InvalidRequest
from service.http.exception_handlers import to_service_error
from service.http.responses import JSON, declare_responses
from service.rollouts.rollout import Rollout
from service.server import Server

EVENT_STREAM = "text/event-stream"
STREAM_RESPONSES = as_openai(declare_responses({200: (*JSON, EVENT_STREAM)}, *ROLLOUT_ERRORS))
KEEP_ALIVE = b": samples are still being generated\n\n"
DONE = b"data: [DONE]\n\n"

Chunk = Callable[[int, SampleAnswer], Awaitable[dict[str, Any]]]
"""Builds the payload (`choices` and top-level fields) of a sample and its group's index."""


class StreamOptions(CompatModel):
    """Streaming options; as in vLLM, `continuous_usage_stats` requires `include_usage`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class StreamFields(CompatModel):
    stream: Flag = False
    stream_options: StreamOptions | None = None

    def check_stream(self) -> None:
        if not self.stream and self.stream_options and self.stream_options.model_fields_set:
            raise InvalidRequest.of_parameter("stream_options", "allowed only with stream: true")


def stream_response(
    server: Server,
    rollout: Rollout,
    head: dict[str, Any],
    chunk: Chunk,
    options: StreamOptions | None,
) -> Response:
    """Response that streams a rollout as server-sent events; a disconnect cancels the rollout."""
    stream = _Stream(server, rollout, head, chunk, options or StreamOptions())
    return StreamingResponse(stream.events(), media_type=EVENT_STREAM)


@dataclass(frozen=True, slots=True)
class _Stream:
    """Server-sent events of one rollout, in OpenAI's streaming format.

    Each choice is sent as a whole once it has ended, since the engine returns samples and not
    single tokens.
    """

    server: Server
    rollout: Rollout
    head: dict[str, Any]
    chunk: Chunk
    options: StreamOptions

    async def events(self) -> AsyncIterator[bytes]:
        """Encoded server-sent events of the stream, with `[DONE]` as the last.

        An error is an event as well, since the status is sent before the first event.
        """
        try:
            async for event in self._chunks():
                yield event
        except Exception as error:
            failed = to_service_error(ExceptionGroup("a stream broke off", [error]))
            yield self._error(failed.problem())
        finally:
            self.server.rollouts.on_disconnect(self.rollout)
        yield DONE

    async def _chunks(self) -> AsyncIterator[bytes]:
        async for record in self.rollout.records():
            match record:
                case SampleRecord(group=group, sample=sample):
                    content = await self.chunk(group, sample)
                    yield _sse_event({**self.head, **content, **self._usage(group, sample)})
                case ProgressRecord():
                    yield KEEP_ALIVE
                case EndRecord(problem=problem) if problem is not None:
                    yield self._error(problem)
                case EndRecord() if self.options.include_usage:
                    total = usage(await self.rollout.answer())
                    yield _sse_event({**self.head, "choices": [], "usage": total})

    def _usage(self, group: int, sample: SampleAnswer) -> dict[str, Any]:
        """Field `usage` of a stream's chunk, if requested; null in chunks without token counts."""
        if not self.options.include_usage:
            return {}
        if not self.options.continuous_usage_stats:
            return {"usage": None}
        prompt = self.rollout.groups[group].options.prompt_token_ids
        return {"usage": token_counts(len(prompt), len(sample.token_ids))}

    def _error(self, problem: Problem) -> bytes:
        """Server-sent error event in the format of vLLM's ErrorResponse; counted in the metrics."""
        self.server.metrics.http.problems.labels(problem.code).inc()
        error = {**with_openai_error(problem)["error"], "param": None, "code": problem.status}
        return _sse_event({"error": error})


def _sse_event(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def unix_time() -> int:
    """Current Unix time in seconds, for the response field `created`."""
    return int(time.time())
