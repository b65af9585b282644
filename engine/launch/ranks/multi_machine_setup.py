"""Setup of an engine on several machines: start checks, network variables."""

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any, Final

import psutil

from engine.errors import StartFailed
from engine.settings import EngineSettings

LOOPBACK: Final = "127.0.0.1"
RESOLVE_SECONDS: Final = 1.0
MAX_RESOLVE_SECONDS: Final = 120.0
_JOINED: Final = re.compile(r"|auto|[^\s/]+:\d+")
"""RAY_ADDRESS of a running cluster. Ray starts one for `local`, and `ray://` is a client's."""


def check_ray(settings: EngineSettings, *, finds: Callable[[str], object] = find_spec) -> None:
    """Raise StartFailed if Ray is needed and not installed, by `finds`.

    Also if it cannot be reached as a node of it.
    """
    if not settings.uses_ray:
        return
    if not finds("ray"):
        raise StartFailed(
            "engine.distributed_executor_backend ray needs Ray, which is not installed: install "
            "coppice-rl[ray]"
        )
    address = os.environ.get("RAY_ADDRESS", "")
    if not _JOINED.fullmatch(address):
        raise StartFailed(
            f"RAY_ADDRESS is {address!r}, and the service must be on a node of a running cluster: "
            "set RAY_ADDRESS to host and port"
        )


def network_variables(settings: EngineSettings) -> dict[str, str]:
    """Variables with the address, and its interface, at which this machine's ranks are reached.

    VLLM_HOST_IP and GLOO_SOCKET_IFNAME of the operator take precedence.
    """
    if settings.nnodes == 1:
        return {"VLLM_HOST_IP": LOOPBACK}
    address = os.environ.get("VLLM_HOST_IP") or _address_towards(settings)
    variables = {"VLLM_HOST_IP": address}
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _interface_of(address)):
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def set_network_variables(address: str, defaults: Mapping[str, str]) -> None:
    """Set the address of a Ray node for its rank, unless the node's environment has one.

    `defaults` are variables of the service, and come before the interface of the address.
    """
    for name, value in ({"VLLM_HOST_IP": address} | dict(defaults)).items():
        os.environ.setdefault(name, value)
    if interface := _interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _address_towards(settings: EngineSettings) -> str:
    """Local address of the route to machine 0. Connecting a UDP socket sends nothing."""
    family, address = _resolve(settings)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StartFailed(
            f"engine.master_addr: no route to {settings.master_addr}: {error.strerror}"
        ) from error


def _resolve(settings: EngineSettings) -> tuple[socket.AddressFamily, Any]:
    """Address of machine 0. A name that is not known yet, as of a new pod, is waited for."""
    host, port = settings.master_addr, settings.master_port
    deadline = time.monotonic() + min(settings.start_seconds, MAX_RESOLVE_SECONDS)
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            return found[0][0], found[0][4]
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"engine.master_addr: {host} is not known: {error.strerror}"
                ) from error
        time.sleep(RESOLVE_SECONDS)


def _interface_of(address: str) -> str | None:
    wanted = ip_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        internet = [one for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
        if any(ip_address(one.address.partition("%")[0]) == wanted for one in internet):
            return name
    return None


def check_serves(settings: EngineSettings) -> None:
    """Raise StartFailed on a machine that has ranks only."""
    if settings.node_rank > 0:
        raise StartFailed(
            f"engine.node_rank is {settings.node_rank}: only machine 0 has the engine; "
            "run `coppice serve` here"
        )
