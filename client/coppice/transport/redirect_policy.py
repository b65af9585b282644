"""Policy for redirects, which would send the API key and the body to another host.

A replica answers 307 with the address of the replica that has the requested object. Anyone able to
forge this address would receive the API key. A redirect is therefore followed only to the host of
the base URL or to hosts that the caller lists, and never to another scheme, to another path or to
an address with credentials.
"""

import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import SplitResult, unquote, urlsplit

from coppice.errors import Redirected

MAX_REDIRECTS = 2
"""An object that has moved may move again during the request."""


class RedirectPolicy:
    """Trusted hosts. `replicas`: host names, `*.domain` suffixes, addresses or networks."""

    def __init__(self, base_url: str, replicas: Iterable[str] = ()) -> None:
        base = urlsplit(base_url)
        self._scheme = base.scheme
        self._hosts = [base.hostname or "", *(_validate_host(entry) for entry in replicas)]

    def redirect_base_url(self, location: str | None, path: str) -> str:
        """Base URL at which to request `path`. Raises Redirected if it is not trusted."""
        if location is None:
            raise Redirected("sent on without an address")
        try:
            target = urlsplit(location)
            host = target.hostname
        except ValueError:
            raise Redirected("sent on to what is no address") from None
        if target.scheme != self._scheme or host is None or "@" in target.netloc:
            raise Redirected(f"sent on to an address that is no plain {self._scheme}:// one")
        if not any(_matches(host, trusted) for trusted in self._hosts):
            raise Redirected(
                f"sent on to {host}, which may not have the key; name it in `replicas` if it may"
            )
        return _strip_path(target, path)


def _strip_path(target: SplitResult, path: str) -> str:
    wanted, found = unquote(path.partition("?")[0]), unquote(target.path)
    if not found.endswith(wanted):
        raise Redirected("sent on to another path than was asked for")
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
        raise ValueError(f"no host, *.domain or network: {entry!r}")
    return entry.lower()
