"""Settings class of CUDA graph planning: memory budget, draft lengths, trace file."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from engine.cudagraphs.draft_lengths import DraftLengthTiers
from engine.settings.base import BufferBytes, Section


def _validate_lengths(text: str) -> str:
    DraftLengthTiers.parse(text)
    return text


DraftLengths = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    AfterValidator(_validate_lengths),
]


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
