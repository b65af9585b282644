"""Engines whose ranks are on several machines: what they cannot do, and their network variables.

Features that keep files or shared memory of one machine are refused at the start.
"""

import os
import socket
import time
from collections.abc import Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

import psutil

from engine.errors import StartFailed
from engine.settings import EngineSettings, SpeculationSettings

if TYPE_CHECKING:
    from engine.launch.processes import VllmProcesses

LOOPBACK: Final = "127.0.0.1"
RESOLVE_SECONDS: Final = 1.0
MAX_RESOLVE_SECONDS: Final = 120.0


class MachineDigests(TypedDict):
    """Digests of what all machines of an engine must have in common."""

    settings: str
    versions: str
    model: str


_DIFFERENCES: Final[tuple[tuple[Literal["settings", "versions", "model"], str], ...]] = (
    (
        "settings",
        "were started with other settings than machine 0; all but engine.node_rank must be the "
        "same",
    ),
    ("versions", "have other versions of Coppice, vLLM or torch than machine 0"),
    ("model", "have other files of the model than machine 0"),
)


def check_machines(settings: EngineSettings, speculation: SpeculationSettings) -> None:
    """Raise StartFailed if a feature in the settings does not work on several machines."""
    if settings.nnodes == 1:
        return
    for is_set, change, reason in (
        (
            settings.prompt_kv,
            "engine.prompt_kv to false",
            "prompt KV is exported to the shared memory of one machine",
        ),
        (
            settings.kv_offload_bytes is not None,
            "engine.kv_offload_bytes to none",
            "offloaded KV is in the host memory of one machine",
        ),
        (
            settings.weight_transfer is not None,
            "engine.weight_transfer to none",
            "weights in GPU memory are handed over on one machine",
        ),
        (
            speculation.mode == "drafter",
            "speculation.mode to siblings or off",
            "checkpoints of the draft model are files of one machine",
        ),
    ):
        if is_set:
            raise StartFailed(f"{reason}, and engine.nnodes is {settings.nnodes}; set {change}")


def network_variables(settings: EngineSettings) -> dict[str, str]:
    """Variables with the address, and its interface, at which this machine's ranks are reached.

    VLLM_HOST_IP and GLOO_SOCKET_IFNAME of the operator take precedence.
    """
    if settings.nnodes == 1:
        return {"VLLM_HOST_IP": LOOPBACK}
    address = own_address(settings)
    variables = {"VLLM_HOST_IP": address}
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _interface_of(address)):
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def own_address(settings: EngineSettings) -> str:
    """Address at which the engine's other machines reach this one."""
    return os.environ.get("VLLM_HOST_IP") or _address_towards(settings)


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


async def synchronize_machines(processes: "VllmProcesses", settings: EngineSettings) -> None:
    """Give the ranks of all machines one random seed, and the model's path on machine 0.

    Each rank samples all tokens itself, so unequal seeds would give unequal tokens. Raises
    StartFailed if the machines have different settings, versions or models.
    """
    if settings.nnodes == 1:
        return
    check_equal(await processes.call_workers("coppice_machine_digests"), settings.ranks_per_node)
    model = processes.llm.vllm_config.model_config
    await processes.call_workers("coppice_join_machines", model.seed, model.model)


def check_equal(digests: Sequence[MachineDigests], ranks_per_node: int) -> None:
    """Raise StartFailed if the ranks of machines differ."""
    for name, difference in _DIFFERENCES:
        values = [found[name] for found in digests]
        if others := [rank for rank, value in enumerate(values) if value != values[0]]:
            nodes = sorted({rank // ranks_per_node for rank in others})
            raise StartFailed(f"machines {nodes} {difference}")


def check_serves(settings: EngineSettings) -> None:
    """Raise StartFailed on a machine that has ranks only."""
    if settings.node_rank > 0:
        raise StartFailed(
            f"engine.node_rank is {settings.node_rank}: only machine 0 has the engine; "
            "run `coppice serve` here"
        )
