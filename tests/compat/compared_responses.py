"""Comparison of the responses of two servers to one request, whole ones and streams.

Ids and times are left out. The chunks of a stream are joined, since each server cuts them at other
tokens. Floats may differ by the rounding of another batch.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

TOLERANCE = 1e-4
VARYING = frozenset(
    {
        *("id", "created", "created_at", "completed_at", "request_id", "item_id", "call_id"),
        *("cached_tokens", "created_cache_tokens"),
        *("cache_read_input_tokens", "cache_creation_input_tokens"),
        *("system_fingerprint", "kv_transfer_params", "sequence_number", "signature", "version"),
    }
)
"""Fields whose values are ids, times, labels of versions or depend on earlier requests.

They must be in both responses, with values of the same type.
"""
TEXTS = frozenset({"content", "text", "reasoning", "arguments", "partial_json", "thinking"})
Different = tuple[str, Any, Any]


def content(response: httpx.Response) -> dict[str, Any]:
    """Compared part of a response: its JSON, or the joined events of a stream."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        body: Any = _joined(list(_events(response.text)))
    elif kind.endswith("json"):
        body = response.json()
    else:
        body = response.text
    return {"status": response.status_code, "content-type": kind, "body": _without_varying(body)}


def differences(theirs: Any, ours: Any, path: str = "") -> Iterator[Different]:
    match theirs, ours:
        case dict(), dict():
            for name in sorted(theirs.keys() | ours.keys()):
                place = f"{path}.{name}"
                if name not in theirs or name not in ours:
                    yield place, theirs.get(name, "missing"), ours.get(name, "missing")
                else:
                    yield from differences(theirs[name], ours[name], place)
        case list(), list() if len(theirs) == len(ours):
            for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
                yield from differences(one, other, f"{path}[{index}]")
        case float(), float() if math.isclose(theirs, ours, rel_tol=0, abs_tol=TOLERANCE):
            return
        case _ if type(theirs) is not type(ours) or theirs != ours:
            yield path, theirs, ours


def _without_varying(value: Any) -> Any:
    match value:
        case dict():
            return {
                name: type(each).__name__ if name in VARYING else _without_varying(each)
                for name, each in value.items()
            }
        case list():
            return [_without_varying(each) for each in value]
        case _:
            return value


def _events(text: str) -> Iterator[tuple[str, Any]]:
    """The events of a stream with their types; comments are left out."""
    for block in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if not line.startswith(":")
        )
        if "data" in fields:
            data = fields["data"]
            yield fields.get("event", ""), data if data == "[DONE]" else _parsed(data)


def _parsed(data: str) -> Any:
    """The JSON of an event; the parts of a tool call that come in one chunk are joined."""

    def joined(value: dict[str, Any]) -> dict[str, Any]:
        calls = value.get("tool_calls")
        return {**value, "tool_calls": _join_indexed([], calls)} if calls else value

    return json.loads(data, object_hook=joined)


def _joined(events: Sequence[tuple[str, Any]]) -> Any:
    """The parts of a stream: equal chunks in a row, joined; chunks of a choice, also between.

    The choices are in the order of their indices.
    """
    parts = dict[Any, Any]()
    order = list[Any]()
    for event, data in events:
        key, chunk = _key(event, data, order)
        if key not in parts:
            parts[key] = {"event": event, "first": _fields(chunk), "joined": chunk}
            order.append(key)
        else:
            parts[key]["joined"] = _join(parts[key]["joined"], chunk)
        parts[key]["last"] = _fields(chunk)
    choices = sorted(key for key in order if key[0] == "choice")
    return [parts[key] for key in (*choices, *(key for key in order if key[0] != "choice"))]


def _key(event: str, data: Any, order: Sequence[Any]) -> tuple[Any, Any]:
    """Key of the part of a stream that a chunk belongs to, and the chunk."""
    if not isinstance(data, dict):
        return (data, 0), data
    if data.get("choices"):
        [choice] = data["choices"]
        return ("choice", choice["index"]), data
    kind = data.get("type", event)
    is_delta = "delta" in str(kind) and kind != "message_delta"
    previous = order[-1] if order else None
    if is_delta and previous and previous[0] == kind:
        return previous, data
    return (kind, len(order)), data


def _fields(chunk: Any) -> Any:
    """Names of the fields of a chunk and of its choices."""
    if not isinstance(chunk, dict):
        return None
    names = chunk.keys() - {"system_fingerprint"}  # in the last chunk, which may be the first
    return sorted(names), [sorted(choice) for choice in chunk.get("choices", ())]


def _join(before: Any, chunk: Any) -> Any:
    match before, chunk:
        case dict(), dict():
            return {
                name: _join_field(name, before.get(name), chunk.get(name))
                for name in {**before, **chunk}
            }
        case _:
            return chunk


def _join_field(name: str, before: Any, chunk: Any) -> Any:
    if before is None or chunk is None:
        return before if chunk is None else chunk
    if name in ("choices", "tool_calls"):
        return _join_indexed(before, chunk)
    if isinstance(before, str) and (name in TEXTS or name == "delta"):
        return before + chunk
    if isinstance(before, list):
        return before + chunk
    return _join(before, chunk)


def _join_indexed(before: list[Any], chunk: list[Any]) -> list[Any]:
    """Parts with the same index joined, also those of one chunk: vLLM cuts calls at chunks."""
    found = dict[int, Any]()
    for each in (*before, *chunk):
        index = each.get("index", 0)
        found[index] = _join(found[index], each) if index in found else each
    return list(found.values())
