"""Python client of the Coppice rollout server, for RL trainers."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coppice.public import *  # noqa: F403
    from coppice.public import __all__ as __all__


def __getattr__(name: str) -> Any:
    """A public name. Servers, which use single modules, need not wait for the import of all."""
    return getattr(importlib.import_module("coppice.public"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
