"""Where the server is and what it is told of who asks. No error here repeats what it was given."""

import base64
from contextlib import suppress
from dataclasses import dataclass, field

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The credentials are kept out of the URL, because errors and logs name URLs."""

    base_url: str
    authorization: str | None = field(repr=False)


def parse_address(base_url: str, api_key: str | None) -> ServerAddress:
    """Credentials are the key, or those of a URL like http://user:key@host, or none."""
    url = _url_of(base_url)
    if api_key is not None and url.userinfo:
        raise ValueError("give the key as api_key or in base_url, not both")
    return ServerAddress(
        base_url=str(url.copy_with(userinfo=b"")),
        authorization=_basic(url) if api_key is None else _bearer(api_key),
    )


def _url_of(base_url: str) -> httpx.URL:
    url = None
    # Its words are not even kept as a context: they may quote a key with a slash in it as a port.
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
