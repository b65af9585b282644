"""Server-sent events, in the way of OpenAI's streams."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from coppice.wire.problems import Problem
from coppice.wire.records import EndRecord, ProgressRecord, SampleRecord
from coppice.wire.rollouts import SampleAnswer
from service.compat.bodies import CompatModel, Flag
from service.compat.error_format import with_openai_error
from service.compat.rollout_adapter import EVENT_STREAM, token_counts, usage
from service.http.errors import InvalidRequest
from service.http.failures import to_service_error
from service.rollouts.rollout import Rollout
from service.server import Server

KEEP_ALIVE = b": samples are still being drawn\n\n"
DONE = b"data: [DONE]\n\n"

Chunk = Callable[[int, SampleAnswer], Awaitable[dict[str, Any]]]
"""What to write of a sample of the group with this index: `choices`, and fields beside it."""


class StreamOptions(CompatModel):
    """As in vLLM, `continuous_usage_stats` does nothing without `include_usage`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class StreamFields(CompatModel):
    stream: Flag = False
    stream_options: StreamOptions | None = None

    def check_stream(self) -> None:
        if not self.stream and self.stream_options and self.stream_options.model_fields_set:
            raise InvalidRequest.of_parameter("stream_options", "only with stream: true")


def stream_response(
    server: Server,
    rollout: Rollout,
    head: dict[str, Any],
    chunk: Chunk,
    options: StreamOptions | None,
) -> Response:
    """For whoever started the rollout: it ends when they leave."""
    stream = _Stream(server, rollout, head, chunk, options or StreamOptions())
    return StreamingResponse(stream.events(), media_type=EVENT_STREAM)


@dataclass(frozen=True, slots=True)
class _Stream:
    """A rollout's events. A choice is sent when it has ended: the engine hands out samples, not
    single tokens."""

    server: Server
    rollout: Rollout
    head: dict[str, Any]
    chunk: Chunk
    options: StreamOptions

    async def events(self) -> AsyncIterator[bytes]:
        """The status was sent before the first event, so an error is an event as well."""
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
                    sample_texts = await self.chunk(group, sample)
                    yield _sse_event({**self.head, **sample_texts, **self._usage(group, sample)})
                case ProgressRecord():
                    yield KEEP_ALIVE
                case EndRecord(problem=problem) if problem is not None:
                    yield self._error(problem)
                case EndRecord() if self.options.include_usage:
                    total = usage(await self.rollout.answer())
                    yield _sse_event({**self.head, "choices": [], "usage": total})

    def _usage(self, group: int, sample: SampleAnswer) -> dict[str, Any]:
        """OpenAI's own chunks have null where there is none yet."""
        if not self.options.include_usage:
            return {}
        if not self.options.continuous_usage_stats:
            return {"usage": None}
        prompt = self.rollout.groups[group].prompt_token_ids
        return {"usage": token_counts(len(prompt), len(sample.token_ids))}

    def _error(self, problem: Problem) -> bytes:
        """vLLM's ErrorResponse."""
        self.server.metrics.problems.labels(problem.code).inc()
        error = {**with_openai_error(problem)["error"], "param": None, "code": problem.status}
        return _sse_event({"error": error})


def _sse_event(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def unix_time() -> int:
    """Seconds since 1970, which is what `created` means to these clients."""
    return int(time.time())
