"""What lies in Redis, as JSON. Others write there too, perhaps of another release: an entry that
cannot be read is left out, never an error."""

import logging
from collections.abc import Iterable
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from service.cluster.registry import Manifest, Order, Replica

T = TypeVar("T")

REPLICA = TypeAdapter(Replica)
MANIFEST = TypeAdapter(Manifest)
ORDER = TypeAdapter(Order)

log = logging.getLogger(__name__)


def read(kind: TypeAdapter[T], entry: bytes | None) -> T | None:
    if entry is None:
        return None
    try:
        return kind.validate_json(entry)
    except ValidationError:
        log.warning("an entry of the directory cannot be read and is left out")
        return None


def read_all(kind: TypeAdapter[T], entries: Iterable[bytes]) -> list[T]:
    return [found for entry in entries if (found := read(kind, entry)) is not None]
