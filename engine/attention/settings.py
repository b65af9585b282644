"""Settings of shared-prefix attention. Imports neither torch nor vLLM."""

import os
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from engine.settings.base import Section, parse_off

ENVIRONMENT: Final = "COPPICE_ENGINE_ATTENTION"
"""Variable with the settings of EngineCore and the workers."""
SharedPrefixMode = Literal["auto", "always", "off"]


class AttentionSettings(Section):
    """Settings of shared-prefix attention."""

    shared_prefix: Annotated[SharedPrefixMode, BeforeValidator(parse_off)] = Field(
        "auto",
        description="reads the KV of a shared prefix once per engine step instead of once per "
        "sample; auto: where a measurement at startup shows a gain; always: for every shared "
        "prefix; off: vLLM's attention only; set it to off to compare with vLLM's attention",
    )


def process_settings() -> AttentionSettings:
    """The engine's attention settings, read from the environment in EngineCore or a worker."""
    return AttentionSettings.model_validate_json(os.environ.get(ENVIRONMENT, "{}"))
