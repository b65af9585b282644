"""Messages to and from the trainer, one JSON object per line. This module does not import torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.drafter.service.checkpoint_dir import TRAINER_CHECKPOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A finished sample; `version` is that of the weights that generated its last token.

    `top_logprobs` are those of each response token, encoded by `soft_targets.encode_top_k`, or
    empty if none were recorded.
    """

    version: str
    prompt: list[int]
    response: list[int]
    top_logprobs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPaused:
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptWeights:
    """Weights trained elsewhere, to continue from."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A complete drafter in a file, to be moved away by the receiver."""

    path: str
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Totals since the drafter was created.

    `num_tokens` were trained on; `loss` is the recent mean per token.
    """

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
