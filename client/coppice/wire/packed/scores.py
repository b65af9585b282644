"""Packed answer of POST /v1/score: one safetensors file.

    logprobs  float32  [tokens]         all responses, in the order of the request
    offsets   int64    [responses + 1]  response i owns offsets[i]:offsets[i + 1]

The tables `top_logprobs` and `given_logprobs`, if requested, have a position per token, in the
format of `results`. The metadata's `answer` is the ScoreAnswer with these arrays empty.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from coppice.safetensors_io import load_arrays, parse_header
from coppice.wire.columns.kinds import NO_ENTRIES, Tables, Tensors, tables_of
from coppice.wire.score import ScoreAnswer, ScoredItem, ScoredResponse

_TABLES = ("top_logprobs", "given_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedScores:
    """Scores with logprobs as arrays, one per response; the tables are part of the answer."""

    answer: ScoreAnswer
    logprobs: list[NDArray[np.float32]]


def pack_scores(answer: ScoreAnswer) -> bytes:
    responses = list(_responses(answer))
    lengths = [len(response.logprobs) for response in responses]
    tensors: Tensors = {
        "logprobs": np.concatenate(
            [np.empty(0, np.float32), *(np.array(r.logprobs, np.float32) for r in responses)]
        ),
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
    }
    for name in _TABLES:
        tensors |= Tables().tensors(name, [getattr(each, name) for each in responses], lengths)
    stripped = _mapped(answer, iter([{"logprobs": []}] * len(responses)), {})
    data: bytes = save(tensors, metadata={"answer": stripped.model_dump_json()})
    return data


def unpack_scores(data: bytes) -> PackedScores:
    """Parses a packed answer. Raises ValueError if the bytes are invalid."""
    try:
        tensors, metadata = load_arrays(data), parse_header(data).metadata
        answer = ScoreAnswer.model_validate_json(metadata["answer"])
        offsets, logprobs = tensors["offsets"], tensors["logprobs"]
    except KeyError as error:
        raise ValueError(f"not a packed answer: {error}") from error
    lengths = np.diff(offsets).tolist()
    if len(lengths) != len(list(_responses(answer))) or sum(lengths) != len(logprobs):
        raise ValueError("the offsets do not match the responses")
    tables = {name: tables_of(name, tensors, lengths) for name in _TABLES}
    return PackedScores(
        answer=_mapped(answer, iter([{}] * len(lengths)), tables),
        logprobs=np.split(logprobs, offsets[1:-1]),
    )


def _responses(answer: ScoreAnswer) -> Iterator[ScoredResponse]:
    return (response for item in answer.items for response in item.responses)


def _mapped(
    answer: ScoreAnswer, updates: Iterator[dict[str, Any]], tables: dict[str, Iterator[Any]]
) -> ScoreAnswer:
    """Copy of an answer with other fields and tables; without `tables` they are emptied."""

    def response(given: ScoredResponse) -> ScoredResponse:
        found = {name: next(tables[name]) if tables else NO_ENTRIES for name in _TABLES}
        present = {name: found[name] for name in _TABLES if getattr(given, name) is not None}
        return given.model_copy(update={**next(updates), **present})

    def item(given: ScoredItem) -> ScoredItem:
        return given.model_copy(update={"responses": [response(r) for r in given.responses]})

    return answer.model_copy(update={"items": [item(each) for each in answer.items]})
