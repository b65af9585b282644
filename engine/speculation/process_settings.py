"""Speculation settings of this process, set at startup in each process that runs the model."""

from engine.feature_settings import SpeculationMode, SpeculationSettings

SIBLING_MODES: tuple[SpeculationMode, ...] = ("siblings", "auto")
"""Modes whose drafts come from the draft store. `auto` was replaced by `off` where it is off."""

_settings: SpeculationSettings | None = None


def install(settings: SpeculationSettings) -> None:
    global _settings
    _settings = settings


def settings() -> SpeculationSettings:
    assert _settings is not None, "speculation settings used before `install`"
    return _settings
