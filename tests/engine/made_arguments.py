"""vLLM's engine arguments and environment as the product makes them of settings."""

from collections.abc import Mapping
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs

from engine.feature_base import StartSettings
from engine.features import Features
from engine.launch import arguments
from engine.settings import EngineSettings
from engine.settings.base import Section


def features_of(settings: EngineSettings, **sections: Section) -> Features:
    return Features(StartSettings(engine=settings, **sections))


def engine_arguments(
    settings: EngineSettings,
    model: Path,
    *,
    on_cpu: bool,
    capabilities: Mapping[str, object] | None = None,
    **sections: Section,
) -> AsyncEngineArgs:
    features = features_of(settings, **sections)
    return arguments.engine_arguments(
        settings, model, features, on_cpu=on_cpu, capabilities=capabilities
    )


def arguments_and_environment(
    settings: EngineSettings, model: Path, **sections: Section
) -> tuple[AsyncEngineArgs, dict[str, str]]:
    """Arguments and the features' variables of an engine on a GPU."""
    features = features_of(settings, **sections)
    made = arguments.engine_arguments(settings, model, features, on_cpu=False)
    return made, features.environment()
