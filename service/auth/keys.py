"""Named keys, what they may do, and the file that lists them.

The file holds only hashes. A key is 256 random bits, so one SHA-256 of it cannot be guessed back.
A slow hash protects secrets that people choose; here it would let strangers burn processor time.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from coppice.wire.base import Label
from service.config.sources import SettingsError, read_yaml

Role = Literal["rollout", "kv", "watch", "replica", "admin"]
ROLES: frozenset[Role] = frozenset(get_args(Role))

_PREFIX = "coppice_"  # lets scanners of leaked secrets know one when they see it


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """Who asks. Rollouts, idempotency keys and limits belong to the name."""

    name: str
    roles: frozenset[Role]


class ApiKeyEntry(BaseModel):
    """One item of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Label
    roles: Annotated[tuple[Role, ...], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @property
    def key(self) -> ApiKey:
        return ApiKey(name=self.name, roles=frozenset(self.roles))


_ENTRIES = TypeAdapter(tuple[ApiKeyEntry, ...])


def generate_key(name: str, roles: Iterable[str]) -> tuple[str, str]:
    """A fresh key, and the lines of the file that let it in."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    lines = [{"name": name, "roles": list(roles), "sha256": _sha256(secret)}]
    _parse_entries(lines, "the new key")
    return secret, yaml.safe_dump(lines, sort_keys=False)


def read_keys(file: Path) -> tuple[ApiKeyEntry, ...]:
    """Raises SettingsError, which never quotes the file."""
    entries = _parse_entries(read_yaml(file), str(file))
    if not entries:
        raise SettingsError(f"{file}: holds no key; 'coppice new-key' makes one")
    for field in ("name", "sha256"):
        if len({getattr(entry, field) for entry in entries}) < len(entries):
            raise SettingsError(f"{file}: two keys have the same {field}")
    return entries


def match_key(entries: Sequence[ApiKeyEntry], secret: str) -> ApiKey | None:
    """Compares with every entry in constant time, so that time tells nothing about any of them."""
    digest = _sha256(secret)
    found = None
    for entry in entries:
        if hmac.compare_digest(entry.sha256, digest):
            found = entry.key
    return found


def _parse_entries(content: object, origin: str) -> tuple[ApiKeyEntry, ...]:
    try:
        return _ENTRIES.validate_python([] if content is None else content)
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False, include_context=False)
        raise SettingsError(
            *(f"{origin}: {_field_path(f['loc'])}{f['msg']}" for f in faults)
        ) from None


def _field_path(location: tuple[int | str, ...]) -> str:
    return f"{'.'.join(map(str, location))}: " if location else ""


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
