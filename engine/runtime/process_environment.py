"""Environment variables of the engine's processes: cache directory, settings digest."""

import os
from pathlib import Path

ENGINE_ENV = "COPPICE_ENGINE"
CACHE_ENV = "COPPICE_ENGINE_CACHE"
DIGEST_ENV = "COPPICE_ENGINE_DIGEST"


def started_by_coppice() -> bool:
    """Return true in a process of a Coppice engine. The plugin does nothing in any other vLLM."""
    return os.environ.get(ENGINE_ENV) == "1"


def cache_directory(content: str) -> Path:
    """Directory for measurements that later starts use again."""
    return Path(os.environ[CACHE_ENV], content)


def own_settings_digest() -> str:
    """The settings digest of this process's machine."""
    return os.environ[DIGEST_ENV]
