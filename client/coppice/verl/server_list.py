"""Server URLs from `engine_kwargs.coppice` of verl's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerList:
    """URLs of the servers. The API key is in a file, since verl prints its configuration."""

    urls: tuple[str, ...]
    key_file: str | None = None

    @classmethod
    def of(cls, engine_kwargs: Mapping[str, Any]) -> Self:
        """Builds it from the `engine_kwargs` of a rollout."""
        given = engine_kwargs.get("coppice") or {}
        return cls.given(given.get("urls") or (), given.get("key_file"))

    @classmethod
    def given(cls, urls: Any, key_file: str | None) -> Self:
        addresses = (urls,) if isinstance(urls, str) else tuple(urls)
        if not addresses:
            raise ValueError("engine_kwargs.coppice.urls names no server")
        return cls(urls=addresses, key_file=key_file)

    def url(self, replica: int) -> str:
        """URL of a replica. If there are more replicas than servers, they share servers."""
        return self.urls[replica % len(self.urls)]

    def key(self) -> str | None:
        return None if self.key_file is None else Path(self.key_file).read_text().strip()
