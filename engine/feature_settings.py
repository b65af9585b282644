"""Settings of shared-prefix attention, speculation and CUDA graphs.

Imports neither torch nor vLLM.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from engine.draft_lengths import DraftLengthTiers
from engine.settings_base import BufferBytes, Section

MAX_DRAFT_TOKENS = 15
"""Maximum draft length: shared-prefix attention takes 16 query tokens, one of them sampled."""


def _parse_off(value: object) -> object:
    """Undo YAML's conversion of the word `off` to false."""
    return "off" if value is False else value


def _validate_lengths(text: str) -> str:
    DraftLengthTiers.parse(text)
    return text


SharedPrefixMode = Literal["auto", "always", "off"]
SpeculationMode = Literal["auto", "off", "siblings", "drafter"]
DraftLengths = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    AfterValidator(_validate_lengths),
]


class AttentionSettings(Section):
    """Settings of shared-prefix attention."""

    shared_prefix: Annotated[SharedPrefixMode, BeforeValidator(_parse_off)] = Field(
        "auto",
        description="reads the KV of a shared prefix once per engine step instead of once per "
        "sample; auto: where a measurement at startup shows a gain; always: for every shared "
        "prefix; off: vLLM's attention only; set it to off to compare with vLLM's attention",
    )


class SpeculationSettings(Section):
    """Settings of speculative decoding from sibling samples or by a trained draft model."""

    mode: Annotated[SpeculationMode, BeforeValidator(_parse_off)] = Field(
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


class GraphsSettings(Section):
    """Settings of CUDA graph capture on a GPU."""

    budget_bytes: BufferBytes | None = Field(
        None,
        description="memory for CUDA graphs per rank, in bytes; none: vLLM chooses the graphs; "
        "set it to capture graphs for several draft lengths in a fixed amount of memory",
    )
    lengths: DraftLengths | None = Field(
        None,
        description="draft lengths by number of running samples: `8:0,2,4 32:0,2 0` allows 0, 2 "
        "or 4 draft tokens up to 8 samples, 0 or 2 up to 32, and none above; none: the lengths "
        "that speculation uses; set it to omit graphs of lengths that are rarely used",
    )
    trace: Path | None = Field(
        None,
        description="file of recorded engine steps, for which the choice of graphs is optimised; "
        "none: all numbers of running samples are assumed to be equally frequent; set it if the "
        "usual numbers of running samples are known",
    )
