"""Requests that a web page makes a browser send, which reaches whatever its user can reach.

Two attacks need no key. With DNS rebinding the name of the attacker's page resolves to this server,
so that the browser takes the server's answers for the page's own: `Host` carries that name. With
cross-site requests (forms, images) the page cannot read the answer, but the request has arrived:
browsers mark it with `Sec-Fetch-Site` (W3C Fetch Metadata; HTTPS and loopback only) or `Origin`.
"""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from service.config.settings import ServerSettings
from service.http.errors import Forbidden

LOOPBACK = ("localhost", "*.localhost")  # browsers resolve them themselves (RFC 6761, 6.3)
MARKS = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")


class AllowedHosts:
    """Names that a server without keys answers to.

    An IP address is always one: no name was resolved, so none can have been rebound.
    """

    def __init__(self, settings: ServerSettings) -> None:
        own = [settings.host, settings.operators_host, socket.gethostname()]
        if settings.advertised_url is not None:
            own.append(urlsplit(settings.advertised_url).hostname or "")
        self._patterns = [name.lower() for name in (*LOOPBACK, *own, *settings.allowed_hosts)]

    def check(self, headers: Headers) -> None:
        """A request without Host is not a browser's."""
        if not all(self._allows(host) for host in headers.getlist("host")):
            raise Forbidden(
                "a server without keys does not answer to the name in Host: "
                "add it to server.allowed_hosts, or use an IP address"
            )

    def _allows(self, host: str) -> bool:
        name = _without_port(host)
        return _is_address(name) or _matches(name, self._patterns)


def check_site(headers: Headers, *, page: bool) -> None:
    """Pages of other sites may only lead to a page, as a link does."""
    site = headers.get("sec-fetch-site", "none").lower()
    if site not in ("same-origin", "none") and not (page and _is_navigation(headers)):
        raise Forbidden("requests of another site's pages are not taken")
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
        raise Forbidden("requests of another site's pages are not taken")


def refuse_browsers(headers: Headers) -> None:
    """For a GET that changes something, which an image or a link can send.

    Over plain HTTP a browser marks nothing, but it names itself Mozilla, and a page cannot change
    that in a request that needs no permission.
    """
    agent = headers.get("user-agent", "").lower()
    if agent.startswith("mozilla/") or any(mark in headers for mark in MARKS):
        raise Forbidden("this changes something: browsers must send POST")


def _is_navigation(headers: Headers) -> bool:
    mode, destination = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    return (mode, destination) == ("navigate", "document")


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    name = name if colon and port.isdecimal() else host
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(
        pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))
        for pattern in patterns
    )
