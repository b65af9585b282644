"""JSON entries in Redis.

Replicas of other releases write to the same keys, so an entry that cannot be parsed is skipped with
a warning.
"""

import logging
from collections.abc import Iterable
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from service.cluster.registry import ActivationTarget, Manifest, Replica

T = TypeVar("T")

REPLICA = TypeAdapter(Replica)
MANIFEST = TypeAdapter(Manifest)
TARGET = TypeAdapter(ActivationTarget)

log = logging.getLogger(__name__)


def parse_entry(kind: TypeAdapter[T], entry: bytes | None) -> T | None:
    if entry is None:
        return None
    try:
        return kind.validate_json(entry)
    except ValidationError:
        log.warning("an entry of the cluster registry cannot be read and is ignored")
        return None


def parse_entries(kind: TypeAdapter[T], entries: Iterable[bytes]) -> list[T]:
    return [found for entry in entries if (found := parse_entry(kind, entry)) is not None]
