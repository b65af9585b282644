"""Protection against requests forged by malicious web pages (DNS rebinding, CSRF).

A browser can reach every server that its user can reach. Two attacks need no API key:

- DNS rebinding: the host name of the attacker's page resolves to this server, so that the browser
  treats the server's responses as same-origin. `Host` carries the attacker's name.
- Cross-site requests (forms, images): the page cannot read the response, but the request is
  executed. Browsers mark it with `Sec-Fetch-Site` (W3C Fetch Metadata; HTTPS and loopback only) or
  `Origin`.
"""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from service.config.settings import ServerSettings
from service.errors import Forbidden

LOOPBACK = ("localhost", "*.localhost")  # resolved by the browser itself (RFC 6761, 6.3)
MARKS = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")


class AllowedHosts:
    """Host names that a server without API keys accepts in the header `Host`.

    IP addresses are always accepted: no name was resolved, so DNS rebinding is impossible.
    """

    def __init__(self, settings: ServerSettings) -> None:
        own = [settings.host, settings.operators_host, socket.gethostname()]
        if settings.advertised_url is not None:
            own.append(urlsplit(settings.advertised_url).hostname or "")
        self._patterns = [name.lower() for name in (*LOOPBACK, *own, *settings.allowed_hosts)]

    def check(self, headers: Headers) -> None:
        """Raise Forbidden if the header `Host` holds a name that is not allowed.

        A request without `Host` is accepted: browsers always send it.
        """
        if not all(self._allows(host) for host in headers.getlist("host")):
            raise Forbidden(
                "a server without API keys accepts only known names in Host: "
                "add the name to server.allowed_hosts, or use an IP address"
            )

    def _allows(self, host: str) -> bool:
        name = _without_port(host)
        return _is_address(name) or _matches(name, self._patterns)


def check_site(headers: Headers, *, page: bool) -> None:
    """Raise Forbidden if a web page of another site made the browser send the request.

    The exception is navigation (following a link) to an endpoint with `page`.
    """
    site = headers.get("sec-fetch-site", "none").lower()
    if site not in ("same-origin", "none") and not (page and _is_navigation(headers)):
        raise Forbidden("requests from web pages of other sites are not allowed")
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
        raise Forbidden("requests from web pages of other sites are not allowed")


def refuse_browsers(headers: Headers) -> None:
    """Raise Forbidden for a browser's request to a GET route that changes state.

    An image or a link can send such a GET. Over plain HTTP a browser sends no fetch metadata, but
    its User-Agent starts with Mozilla, and a page cannot change that in a request without a CORS
    preflight.
    """
    agent = headers.get("user-agent", "").lower()
    if agent.startswith("mozilla/") or any(mark in headers for mark in MARKS):
        raise Forbidden("the route changes state: browsers must use POST")


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
