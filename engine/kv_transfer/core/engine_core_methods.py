"""RPC methods added to EngineCore for KV of other engines; they run between two steps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from engine.kv_transfer.core.load_planner import LoadPlanner


def coppice_add_exported_kv(self: "EngineCore", names: Sequence[str]) -> None:
    """Allow loads from slots with these names, until the prefix cache is reset."""
    for name in names:
        _load_planner(self).on_exported(name)


def coppice_remove_exported_kv(self: "EngineCore", names: Sequence[str]) -> None:
    """Prevent loads from slots with these names."""
    for name in names:
        _load_planner(self).on_removed(name)


METHODS = (coppice_add_exported_kv, coppice_remove_exported_kv)


def _load_planner(core: "EngineCore") -> "LoadPlanner":
    from engine.kv_transfer.connector import connector_of

    return connector_of(core.scheduler.connector).load_planner
