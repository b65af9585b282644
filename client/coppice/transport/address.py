"""Server URL and credentials. No error message contains its input, which may hold the API key."""

import base64
from contextlib import suppress
from dataclasses import dataclass, field

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Server URL without credentials, since errors and logs contain URLs, and the auth header."""

    base_url: str
    authorization: str | None = field(repr=False)


def parse_address(base_url: str, api_key: str | None) -> ServerAddress:
    """Parses the URL. Credentials come from api_key, or from a URL like http://user:key@host."""
    url = _url_of(base_url)
    if api_key is not None and url.userinfo:
        raise ValueError("give the key as api_key or in base_url, not both")
    return ServerAddress(
        base_url=str(url.copy_with(userinfo=b"")),
        authorization=_basic(url) if api_key is None else _bearer(api_key),
    )


def _url_of(base_url: str) -> httpx.URL:
    url = None
    # suppress() drops httpx's error even as context: it may quote a key with a slash as a port.
    with suppress(httpx.InvalidURL):
        url = httpx.URL(base_url)
    if url is None:
        raise ValueError("base_url is no URL; special characters of a key need %-escapes")
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("base_url must begin with http:// or https:// and name a host")
    return url


def _bearer(api_key: str) -> str:
    if not api_key or not all("!" <= character <= "~" for character in api_key):
        raise ValueError("api_key must be printable ASCII without spaces")
    return f"Bearer {api_key}"


def _basic(url: httpx.URL) -> str | None:
    if not url.userinfo:
        return None
    if not url.password:
        raise ValueError("base_url names a user without a key; want http://user:key@host")
    pair = f"{url.username}:{url.password}".encode()
    return f"Basic {base64.b64encode(pair).decode()}"
