"""Response declarations of routes, and JSON responses that are encoded in parts.

The declarations list status codes, media types and errors. Their only use is a test that compares
them with openapi.yaml in both directions.

Large bodies are encoded in parts, because a pydantic call holds the GIL until it returns, even in a
thread. Each call encodes one element.
"""

import asyncio
import base64
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import Response
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from coppice.wire.logprobs import TokenLogprobs
from coppice.wire.rollouts import GroupAnswer, RolloutAnswer
from coppice.wire.routed_experts import RoutedExperts
from coppice.wire.sessions import SessionAnswer
from coppice.wire.support import SupportAnswer
from service.http import errors, exception_handlers
from service.http.errors import ServiceError

Problems = Collection[type[ServiceError]]
Responses = dict[int | str, dict[str, Any]]
JSON = ("application/json",)
NO_CONTENT: tuple[str, ...] = ()
COMMON_ERRORS: Problems = (
    errors.Forbidden,
    errors.HeadersTooLarge,
    errors.Internal,
    errors.Overloaded,
)
AUTH_ERRORS: Problems = (errors.Unauthorized,)
REDIRECT = {307: NO_CONTENT}
CLUSTER_ERRORS: Problems = (errors.ReplicaGone, errors.ClusterUnavailable)
READINESS_ERRORS: Problems = (errors.NotReady, errors.Draining, errors.EngineGone)
ADMIN_ERRORS: Problems = (*AUTH_ERRORS, *READINESS_ERRORS)
UPLOAD_ERRORS: Problems = (errors.BodyTooLarge, errors.RequestTimeout)
BODY_ERRORS: Problems = (
    *UPLOAD_ERRORS,
    errors.InvalidJson,
    errors.InvalidRequest,
    errors.UnsupportedMediaType,
)
FILE_ERRORS: Problems = (
    errors.InvalidRequest,
    errors.VersionConflict,
    errors.WeightsRefused,
    errors.DigestMismatch,
    errors.InsufficientStorage,
)
ENGINE_ERRORS: Problems = (
    errors.AdapterNotFound,
    errors.PromptTooLong,
    errors.NoChatTemplate,
    errors.VersionSuperseded,
    errors.VersionUnavailable,
    errors.QuotaExceeded,
    errors.Overloaded,
)
PART_BYTES = 256 * 2**10
SLICE_NUMBERS = 2**13
SLICE_BYTES = 3 * 2**16
Table = TokenLogprobs | SupportAnswer | RoutedExperts
_NO_TABLE = TokenLogprobs.model_construct(
    offsets=np.zeros(0, np.int64),
    token_ids=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
)
_NO_DATA_JSON = b'"data":""'
_LEFT_OUT = re.compile(
    b"|".join(map(re.escape, (_NO_TABLE.model_dump_json().encode(), _NO_DATA_JSON)))
)


def declare_responses(
    successes: Mapping[int, Collection[str]], *raised: type[ServiceError]
) -> Responses:
    """Declare the responses that a route can return, for the route's argument `responses`.

    `successes`: the media types of each success status. `raised`: the errors that the route can
    raise, besides `COMMON_ERRORS`.
    """
    responses: Responses = {
        status: _content(media_types) for status, media_types in successes.items()
    }
    for problem in (*COMMON_ERRORS, *raised):
        responses[problem.kind.status] = _content([exception_handlers.MEDIA_TYPE])
    return responses


def _content(media_types: Collection[str]) -> dict[str, Any]:
    return {"content": {media_type: {} for media_type in media_types}}


def json_response(answer: object, status_code: int = 200) -> Response:
    """JSON response from a small pydantic model or from plain values."""
    content = answer.model_dump_json() if isinstance(answer, BaseModel) else to_json(answer)
    return Response(content, status_code, media_type=JSON[0])


class PartsResponse(Response):
    """Response whose body is a list of byte strings, which are sent one by one.

    The parts are never joined: copying hundreds of MiB would block the event loop.
    """

    def __init__(
        self, parts: Iterable[bytes], *, media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._parts = list(parts)
        super().__init__(media_type=media_type, headers=headers)
        self.headers["content-length"] = str(sum(map(len, self._parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def parts_response(
    encode: Callable[[], Iterable[bytes]],
    *,
    media_type: str = JSON[0],
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Response with a large body, encoded in a thread because it would block the event loop."""
    parts = await asyncio.to_thread(lambda: list(encode()))
    return PartsResponse(parts, media_type=media_type, headers=headers)


def rollout_parts(answer: RolloutAnswer | SessionAnswer) -> Iterator[bytes]:
    groups = (_group(group) for group in answer.groups)
    return collected(_filled(answer, "groups", groups))


def model_parts(answer: BaseModel, name: str) -> Iterator[bytes]:
    """Encode a model as JSON in parts, its long list field `name` element by element."""
    elements: Sequence[BaseModel] = getattr(answer, name)
    return collected(_filled(answer, name, map(table_fragments, elements)))


def value_parts(value: object) -> Iterator[bytes]:
    """Encode plain values (dicts, lists, numbers) as JSON in parts.

    A list of objects is encoded element by element, at the top level or as a member of an object.
    """
    return collected(_value(value))


def collected(fragments: Iterable[bytes]) -> Iterator[bytes]:
    """Join byte fragments to parts of at least `PART_BYTES`; the last part may be smaller."""
    part: list[bytes] = []
    size = 0
    for fragment in fragments:
        part.append(fragment)
        size += len(fragment)
        if size >= PART_BYTES:
            yield b"".join(part)
            part, size = [], 0
    yield b"".join(part)


def _group(group: GroupAnswer) -> Iterator[bytes]:
    samples = (table_fragments(sample) for sample in group.samples)
    if not group.segments:
        return _filled(group, "samples", samples)
    bare = group.model_copy(update={"samples": []})
    segments = (table_fragments(segment) for segment in group.segments)
    before, _, behind = b"".join(_filled(bare, "segments", segments)).partition(b'"samples":[]')
    return _chained(before + b'"samples":[', _separated(samples), b"]" + behind)


def table_fragments(model: BaseModel, *, exclude_none: bool = False) -> Iterator[bytes]:
    """JSON of a model, in fragments; its tables and binary data are encoded in slices.

    Tables are those of logprobs, binary data those of supports and routed experts. `_NO_TABLE` is
    not valid as a table, so it occurs in the shell only in place of the tables. Quotes inside
    strings are escaped, so `_NO_DATA_JSON` occurs only in place of the data.
    """
    tables: list[Table] = []
    shell = _without_tables(model, tables).model_dump_json(exclude_none=exclude_none).encode()
    first, *others = _LEFT_OUT.split(shell)
    assert len(others) == len(tables), "one placeholder per table"
    yield first
    for table, behind in zip(tables, others, strict=True):
        yield from _table(table) if isinstance(table, TokenLogprobs) else _data(table)
        yield behind


def _without_tables(model: BaseModel, tables: list[Table]) -> BaseModel:
    """Copy of a model without its tables and binary data, which are appended to `tables`."""
    changed: dict[str, object] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, TokenLogprobs):
            tables.append(value)
            changed[name] = _NO_TABLE
        elif isinstance(value, SupportAnswer | RoutedExperts):
            tables.append(value)
            changed[name] = value.model_copy(update={"data": type(value.data)()})
        elif isinstance(value, BaseModel):
            bare = _without_tables(value, tables)
            if bare is not value:
                changed[name] = bare
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            bare_list = [_without_tables(each, tables) for each in value]
            if any(bare is not each for bare, each in zip(bare_list, value, strict=True)):
                changed[name] = bare_list
    return model.model_copy(update=changed) if changed else model


def _table(table: TokenLogprobs) -> Iterator[bytes]:
    for index, name in enumerate(TokenLogprobs.model_fields):
        yield b'%b"%b":[' % (b"," if index else b"{", name.encode())
        array = getattr(table, name)
        for start in range(0, len(array), SLICE_NUMBERS):
            yield b"," * (start > 0) + to_json(array[start : start + SLICE_NUMBERS].tolist())[1:-1]
        yield b"]"
    yield b"}"


def _data(model: SupportAnswer | RoutedExperts) -> Iterator[bytes]:
    """Member `data` of a model, in base64, in slices of whole groups of three bytes."""
    yield _NO_DATA_JSON[:-1]
    data = model.data
    for start in range(0, len(data), SLICE_BYTES):
        part = data[start : start + SLICE_BYTES]
        yield part.encode() if isinstance(part, str) else base64.b64encode(part)
    yield b'"'


def _filled(model: BaseModel, name: str, elements: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """JSON of a model, in fragments, with `elements` as the content of its list field `name`.

    Quotes inside strings are escaped, so the search for the empty list finds the field only.
    """
    empty = b'"%b":[]' % name.encode()
    shell = b"".join(table_fragments(model.model_copy(update={name: []})))
    before, found, behind = shell.partition(empty)
    assert found, f"{name} is a list of the answer"
    return _chained(before + empty[:-1], _separated(elements), b"]" + behind)


def _chained(before: bytes, between: Iterable[bytes], behind: bytes) -> Iterator[bytes]:
    yield before
    yield from between
    yield behind


def _separated(elements: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    for index, element in enumerate(elements):
        if index:
            yield b","
        yield from element


def _value(value: object) -> Iterator[bytes]:
    if isinstance(value, dict):
        members = ([to_json(name), b":", *_list(member)] for name, member in value.items())
        return _chained(b"{", _separated(members), b"}")
    return _list(value)


def _list(value: object) -> Iterator[bytes]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _chained(b"[", _separated([to_json(element)] for element in value), b"]")
    return iter([to_json(value)])
