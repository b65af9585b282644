"""API keys and their roles, read from a file and reloaded when it changes.

The file holds only hashes. A key has 256 random bits, so a plain SHA-256 cannot be inverted by
guessing. A slow hash protects passwords that people choose; here it would only let unauthenticated
clients consume CPU time.
"""

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from coppice.wire.base import Label
from service.config.sources import SettingsError, read_yaml

log = logging.getLogger(__name__)

Role = Literal["rollout", "kv", "watch", "replica", "admin"]
ROLES: frozenset[Role] = frozenset(get_args(Role))
_PREFIX = "coppice_"  # lets secret scanners recognize leaked keys
CHECK_SECONDS = 1.0
_Signature = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """The identity of a caller: name and roles of an API key, without its secret.

    Rollouts, idempotency keys and limits are bound to the name, not to the secret.
    """

    name: str
    roles: frozenset[Role]


class ApiKeyEntry(BaseModel):
    """One API key in the keys file: name, roles and SHA-256 of the secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Label
    roles: Annotated[tuple[Role, ...], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @property
    def key(self) -> ApiKey:
        return ApiKey(name=self.name, roles=frozenset(self.roles))


_ENTRIES = TypeAdapter(tuple[ApiKeyEntry, ...])


def generate_key(name: str, roles: Iterable[str]) -> tuple[str, str]:
    """Generate an API key; returns its secret, and the YAML entry for the keys file."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    lines = [{"name": name, "roles": list(roles), "sha256": _sha256(secret)}]
    _parse_entries(lines, "the new key")
    return secret, yaml.safe_dump(lines, sort_keys=False)


def read_keys(file: Path) -> tuple[ApiKeyEntry, ...]:
    """Read the keys file; raises SettingsError, whose message never quotes the file."""
    entries = _parse_entries(read_yaml(file), str(file))
    if not entries:
        raise SettingsError(f"{file}: contains no key; create one with 'coppice new-key'")
    for field in ("name", "sha256"):
        if len({getattr(entry, field) for entry in entries}) < len(entries):
            raise SettingsError(f"{file}: two keys have the same {field}")
    return entries


def match_key(entries: Sequence[ApiKeyEntry], secret: str) -> ApiKey | None:
    """API key with this secret, or None. All entries are compared, each in constant time."""
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


LOCAL_KEY = ApiKey(name="local", roles=ROLES)


class Keyring:
    """API keys that the server accepts. Without a keys file, every caller is `LOCAL_KEY`.

    The file is checked for changes when a key is looked up, at most once per CHECK_SECONDS. It is
    small and local, so it is read on the event loop. If a changed file is invalid, the previous
    keys stay valid.
    """

    def __init__(self, file: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._checked_at = clock()
        self._signature: _Signature = None if file is None else _signature(file)
        self._entries: tuple[ApiKeyEntry, ...] = () if file is None else read_keys(file)

    @property
    def accepts_anyone(self) -> bool:
        return self._file is None

    def find(self, secret: str) -> ApiKey | None:
        if self._file is not None and self._clock() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = self._clock()
            self._reload_if_changed(self._file)
        return match_key(self._entries, secret)

    def _reload_if_changed(self, file: Path) -> None:
        """Read the keys file again if its modification time, size or inode changed.

        This signature is taken before the read, so that a change during the read is seen by the
        next check.
        """
        signature = _signature(file)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._entries = read_keys(file)
        except SettingsError as error:
            log.error("the keys file is invalid, the previous keys stay valid: %s", error)
        else:
            log.info("API keys reloaded", extra={"keys": [entry.name for entry in self._entries]})


def _signature(file: Path) -> _Signature:
    """Modification time, size and inode of a file, to detect changes; None if unreadable.

    Symbolic links are followed: Kubernetes updates a mounted secret by changing a link's target.
    """
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
