"""What callers write into addresses, checked like any other input."""

from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from coppice.wire.base import Label
from coppice.wire.weights import Sequence
from service.errors import InvalidRequest

_LABEL: TypeAdapter[str] = TypeAdapter(Label)
_SEQUENCE: TypeAdapter[int] = TypeAdapter(Sequence)


def label(text: str) -> str:
    try:
        return _LABEL.validate_python(text)
    except ValidationError as error:
        raise InvalidRequest(
            "a version is 1 to 64 letters, digits, dots, dashes and underscores"
        ) from error


def sequence(query: Mapping[str, str]) -> int | None:
    unknown = query.keys() - {"sequence"}
    if unknown:
        raise InvalidRequest(f"unknown parameter: {min(unknown)}")
    if "sequence" not in query:
        return None
    try:
        return _SEQUENCE.validate_strings(query["sequence"])
    except ValidationError as error:
        raise InvalidRequest("sequence is an integer from 0 to 2^53 - 1") from error
