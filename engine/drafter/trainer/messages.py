"""What the trainer is told and what it tells: one JSON object a line. No torch here."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.drafter.service.checkpoint_dir import TRAINER_CHECKPOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`version`: of the weights that said the response's last token. `top_logprobs`: at each of its
    tokens, as `top_logprobs.py` writes them; nothing where none were recorded."""

    version: str
    prompt: list[int]
    response: list[int]
    top_logprobs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPaused:
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptWeights:
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


ToTrainer = Sample | SetPaused | AdoptWeights
FromTrainer = Published | Progress
_MESSAGE_TYPES = {
    kind.__name__: kind for kind in (Sample, SetPaused, AdoptWeights, Published, Progress)
}


def encode_line(message: ToTrainer | FromTrainer) -> bytes:
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode_line(line: bytes) -> ToTrainer | FromTrainer:
    fields = json.loads(line)
    message: ToTrainer | FromTrainer = _MESSAGE_TYPES[fields.pop("kind")](**fields)
    return message


def checkpoint_file(folder: Path) -> Path:
    return folder / f"{TRAINER_CHECKPOINT}.safetensors"
