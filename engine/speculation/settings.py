"""Settings of speculation. Imports neither torch nor vLLM."""

import os
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from engine.settings.base import Section, parse_off

MAX_DRAFT_TOKENS = 15
"""Maximum draft length: shared-prefix attention takes 16 query tokens, one of them sampled."""
SpeculationMode = Literal["auto", "off", "siblings", "drafter"]
SIBLING_MODES: tuple[SpeculationMode, ...] = ("siblings", "auto")
"""Modes whose drafts come from the draft store. `auto` was replaced by `off` where it is off."""
ENVIRONMENT: Final = "COPPICE_ENGINE_SPECULATION"
"""Variable with the settings of EngineCore and the workers."""


class SpeculationSettings(Section):
    """Settings of speculative decoding from sibling samples or by a trained draft model."""

    mode: Annotated[SpeculationMode, BeforeValidator(parse_off)] = Field(
        "off",
        description="source of draft tokens; siblings: text of the same group and prompt; "
        "drafter: a small draft model; auto: siblings, unless a profile at startup shows no gain; "
        "set it to siblings if samples of a group repeat each other's text",
    )
    allow_predicted_loss: bool = Field(
        False,
        description="starts the modes siblings and drafter also where the measured step times "
        "predict that even perfect drafts are more than 5 % slower than no speculation; false: the "
        "start fails; "
        "set it to true to measure such an engine",
    )
    longest_draft: int = Field(
        8,
        ge=1,
        le=MAX_DRAFT_TOKENS,
        description="maximum number of draft tokens per sample and engine step; reduce it if long "
        "drafts are rarely accepted",
    )
    drafter: Path | None = Field(
        None,
        description="directory of the draft model, which must have the served model's vocabulary; "
        "none: a small untrained one is created; set it to start with a trained draft model",
    )
    drafter_training: bool = Field(
        True,
        description="trains the draft model on served samples, in a separate process; disable it "
        "to serve a fixed draft model",
    )

    @property
    def num_drafts(self) -> int:
        """Longest draft; 0 if nothing is drafted."""
        return 0 if self.mode == "off" else self.longest_draft


_settings: SpeculationSettings | None = None


def settings_of_environment() -> SpeculationSettings:
    return SpeculationSettings.model_validate_json(os.environ.get(ENVIRONMENT, "{}"))


def install(settings: SpeculationSettings) -> None:
    """Set the settings of this process, which runs the model."""
    global _settings
    _settings = settings


def process_settings() -> SpeculationSettings:
    assert _settings is not None, "speculation settings used before `install`"
    return _settings
