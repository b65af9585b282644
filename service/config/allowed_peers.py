"""Allow-list of the addresses from which weights may be downloaded, and the API key for them.

Replicas publish their URLs in the cluster registry, and anyone with write access to the registry
can forge them. To protect the API key and to prevent request forgery, only addresses that the
operator has configured are contacted.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

_PORTS = {"http": 80, "https": 443}
_ALLOWED = re.compile(
    r"(https?)://(\*\.)?([A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\])(/\d{1,3})?(:(?:\d{1,5}|\*))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedPeer:
    """Allow-list entry: scheme, host pattern and port of replicas that may be contacted.

    `host` is a host name, a domain suffix with a leading dot, or an IP network. A `port` of None
    matches any port.
    """

    scheme: str
    host: str | ipaddress.IPv4Network | ipaddress.IPv6Network
    port: int | None

    def matches(self, scheme: str, host: str, port: int) -> bool:
        if scheme != self.scheme or self.port not in (None, port):
            return False
        if not isinstance(self.host, str):
            address = _address(host)
            return address is not None and address in self.host
        return host.endswith(self.host) if self.host.startswith(".") else host == self.host


def parse_allowed(text: str) -> AllowedPeer:
    """Parse an entry of the allow-list of peer replicas. Raises ValueError.

    Examples: `http://10.0.0.0/8:8000`, `http://*.replicas:8000`, `https://one.example`.
    """
    found = _ALLOWED.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} must look like http://10.0.0.0/8:8000 or http://*.replicas:8000"
        )
    scheme, wildcard, host, bits, port = found.groups()
    number = _PORTS[scheme] if port is None else None if port == ":*" else int(port[1:])
    hostname_or_address = host.strip("[]").lower()
    if wildcard is not None:
        return AllowedPeer(scheme=scheme, host=f".{hostname_or_address}", port=number)
    if bits is not None or _address(hostname_or_address) is not None:
        network = ipaddress.ip_network(hostname_or_address + (bits or ""))
        return AllowedPeer(scheme=scheme, host=network, port=number)
    return AllowedPeer(scheme=scheme, host=hostname_or_address, port=number)


class Peers:
    """Allow-list of replica addresses for downloads; host names are not resolved by DNS."""

    def __init__(self, allowed: Sequence[str], key_file: Path | None) -> None:
        self._allowed = [parse_allowed(text) for text in allowed]
        self._key_file = key_file

    def allows(self, url: str) -> bool:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            httpx.URL(url)
        except (ValueError, httpx.InvalidURL):
            return False
        if host is None or parts.scheme not in _PORTS or "@" in parts.netloc:
            return False
        port = _PORTS[parts.scheme] if port is None else port
        return any(allowed.matches(parts.scheme, host, port) for allowed in self._allowed)

    def headers(self) -> dict[str, str]:
        """Authorization header for peers; reads the key file on every call, as keys are rotated."""
        if self._key_file is None:
            return {}
        return {"Authorization": f"Bearer {self._key_file.read_text().strip()}"}


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
