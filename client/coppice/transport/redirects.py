"""Server address with credentials, and the policy on which redirects to other servers are safe.

A redirect sends the API key and the body to another host. A replica answers 307 with the address of
the replica that has the requested object. Anyone able to forge this address would receive the API
key. A redirect is therefore followed only to the host of the base URL or to hosts that the caller
lists, and never to another scheme, to another path or to an address with credentials.

No error message contains the base URL, which may hold the API key.
"""

import base64
import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

import httpx

from coppice.errors import Redirected

MAX_REDIRECTS = 2
"""An object that has moved may move again during the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Server URL without credentials, and the Authorization header made of the credentials.

    Errors and logs contain URLs, so URLs must not contain credentials.
    """

    base_url: str
    authorization: str | None = field(repr=False)


def parse_address(base_url: str, api_key: str | None) -> ServerAddress:
    """Parses a server URL, with credentials from api_key or from a URL http://user:key@host."""
    url = _url_of(base_url)
    if api_key is not None and url.userinfo:
        raise ValueError("pass the API key as api_key or in base_url, not both")
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
        raise ValueError(
            "base_url is not a valid URL; special characters of a key must be %-escaped"
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("base_url must start with http:// or https:// and contain a host")
    return url


def _bearer(api_key: str) -> str:
    if not api_key or not all("!" <= character <= "~" for character in api_key):
        raise ValueError("api_key must be printable ASCII without spaces")
    return f"Bearer {api_key}"


def _basic(url: httpx.URL) -> str | None:
    if not url.userinfo:
        return None
    if not url.password:
        raise ValueError("base_url has a user without a key: use http://user:key@host")
    pair = f"{url.username}:{url.password}".encode()
    return f"Basic {base64.b64encode(pair).decode()}"


class RedirectPolicy:
    """Hosts to which redirects are followed: the base URL's host, and `replicas`.

    `replicas` contains host names, `*.domain` suffixes, addresses or networks.
    """

    def __init__(self, base_url: str, replicas: Iterable[str] = ()) -> None:
        base = urlsplit(base_url)
        self._scheme = base.scheme
        self._hosts = [base.hostname or "", *(_validate_host(entry) for entry in replicas)]

    def redirect_base_url(self, location: str | None, path: str) -> str:
        """Base URL of the host to which a request for `path` was redirected.

        Raises Redirected if the host is not trusted.
        """
        if location is None:
            raise Redirected("the server sent a redirect without a Location header")
        try:
            target = urlsplit(location)
            host = target.hostname
        except ValueError:
            raise Redirected("the server sent a redirect to an invalid URL") from None
        if target.scheme != self._scheme or host is None or "@" in target.netloc:
            raise Redirected(
                f"the server sent a redirect to a URL without {self._scheme}:// or with credentials"
            )
        if not any(_matches(host, trusted) for trusted in self._hosts):
            raise Redirected(
                f"the server sent a redirect to {host}, which is not trusted with the API key;"
                " list it in `replicas` to follow the redirect"
            )
        return _strip_path(target, path)


def _strip_path(target: SplitResult, path: str) -> str:
    wanted, found = unquote(path.partition("?")[0]), unquote(target.path)
    if not found.endswith(wanted):
        raise Redirected("the server sent a redirect to a path other than the requested one")
    return f"{target.scheme}://{target.netloc}{found.removesuffix(wanted)}"


def _matches(host: str, trusted: str) -> bool:
    if trusted.startswith("*."):
        return host.endswith(trusted[1:])
    if host == trusted:
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(trusted)
    return False


def _validate_host(entry: str) -> str:
    if not entry or "*" in entry.removeprefix("*.") or "://" in entry:
        raise ValueError(f"not a host name, *.domain, address or network: {entry!r}")
    return entry.lower()
