"""Speculation settings of this process, set at startup in each process that runs the model."""

from engine.settings import SpeculationMode, SpeculationSettings

SIBLING_MODES: tuple[SpeculationMode, ...] = ("siblings", "auto")
"""Modes whose drafts come from the draft store. `auto` was replaced by `off` where it is off."""

_settings: SpeculationSettings | None = None


def install(settings: SpeculationSettings) -> None:
    global _settings
    _settings = settings


def install_gpu_speculator() -> None:
    """Replace vLLM's speculator in a process with a GPU, if drafts come from the draft store."""
    from vllm.platforms import current_platform

    if settings().mode in SIBLING_MODES and not current_platform.is_cpu():
        from engine.speculation import gpu_speculator

        gpu_speculator.install()


def settings() -> SpeculationSettings:
    assert _settings is not None, "speculation settings used before `install`"
    return _settings
