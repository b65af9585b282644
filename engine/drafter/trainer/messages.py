"""What the trainer is told and what it tells: one JSON object a line. No torch here."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.drafter.service.checkpoint_dir import CHECKPOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`version`: of the weights that said the response's last token. `likeliest`: at each of its
    tokens, as `likeliest.py` writes them; nothing where none were recorded."""

    version: str
    prompt: list[int]
    response: list[int]
    likeliest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """Weights to go on from, made elsewhere."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A whole drafter in a file, to be moved away by whoever reads this."""

    path: str
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Since the drafter was made: `num_tokens` that were learned from; `loss`: of late, a token."""

    num_steps: int
    num_tokens: int
    loss: float


Told = Sample | Paused | Adopted
Tells = Published | Progress
_KINDS = {kind.__name__: kind for kind in (Sample, Paused, Adopted, Published, Progress)}


def line_of(message: Told | Tells) -> bytes:
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def read_line(line: bytes) -> Told | Tells:
    fields = json.loads(line)
    message: Told | Tells = _KINDS[fields.pop("kind")](**fields)
    return message


def checkpoint_file(folder: Path) -> Path:
    return folder / f"{CHECKPOINT}.safetensors"
