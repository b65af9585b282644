"""The engine's settings, as its processes read them from the variables that its start sets."""

import os
from pathlib import Path
from typing import Literal

from engine.feature_settings import AttentionSettings, SpeculationSettings

ENGINE_ENV = "COPPICE_ENGINE"
ATTENTION_ENV = "COPPICE_ENGINE_ATTENTION"
SPECULATION_ENV = "COPPICE_ENGINE_SPECULATION"
CACHE_ENV = "COPPICE_ENGINE_CACHE"
DIGEST_ENV = "COPPICE_ENGINE_DIGEST"


def started_by_coppice() -> bool:
    """Return true in a process of a Coppice engine. The plugin does nothing in any other vLLM."""
    return os.environ.get(ENGINE_ENV) == "1"


def attention_settings() -> AttentionSettings:
    """The engine's attention settings, read from the environment in EngineCore or a worker."""
    return AttentionSettings.model_validate_json(os.environ[ATTENTION_ENV])


def cache_directory(content: Literal["attention", "speculation"]) -> Path:
    """Directory for measurements that later starts use again."""
    return Path(os.environ[CACHE_ENV], content)


def own_settings_digest() -> str:
    """The settings digest of this process's machine."""
    return os.environ[DIGEST_ENV]


def speculation_settings() -> SpeculationSettings:
    return SpeculationSettings.model_validate_json(os.environ[SPECULATION_ENV])
