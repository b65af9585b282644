"""JSON-line messages between the service and the training process of the draft model.

This module does not import torch.
"""

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.drafter.service.checkpoint_dir import TRAINER_CHECKPOINT
from engine.types.samples import TopLogprobs

TOP_K: Final = 8
"""Number of most probable tokens that are recorded per position.

A draft is usually one of the top few tokens, and the replay buffer holds thousands of samples.
"""


class TopK(NamedTuple):
    """Recorded top-k tokens and probabilities at each position of a response.

    They are recorded for requests with `top_logprobs` and for trees that are split by entropy. The
    probabilities are those sampled from, with temperature and truncation applied, which also
    determine acceptance of drafts. All tokens beyond the top k form one further outcome. The record
    is sent and stored as text until it is trained on.

    Arrays are [positions, TOP_K]. Missing entries repeat the first token with probability zero.
    """

    tokens: NDArray[np.int32]
    probs: NDArray[np.float32]


def top_k_of(token_top_logprobs: Sequence[TopLogprobs]) -> TopK:
    found = TopK(
        tokens=np.zeros((len(token_top_logprobs), TOP_K), np.int32),
        probs=np.zeros((len(token_top_logprobs), TOP_K), np.float32),
    )
    for row, entries in enumerate(token_top_logprobs):
        # The sampled token occurs twice if it is in the top k.
        known = {entry.token_id: entry.logprob for entry in entries}
        best = sorted(known.items(), key=lambda entry: -entry[1])[:TOP_K]
        found.tokens[row] = best[0][0] if best else 0
        found.tokens[row, : len(best)] = [token for token, _ in best]
        found.probs[row, : len(best)] = [math.exp(logprob) for _, logprob in best]
    return found


def encode_top_k(top_logprobs: TopK) -> str:
    return base64.b64encode(top_logprobs.tokens.tobytes() + top_logprobs.probs.tobytes()).decode()


def decode_top_k(text: str) -> TopK:
    content = base64.b64decode(text)
    half = len(content) // 2
    return TopK(
        tokens=np.frombuffer(content[:half], np.int32).reshape(-1, TOP_K),
        probs=np.frombuffer(content[half:], np.float32).reshape(-1, TOP_K),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Finished sample that is sent to the trainer.

    `version` is the weights version that generated its last token. `top_logprobs` are the top-k
    tokens of each response token, encoded by `encode_top_k`, or empty if none were recorded.
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
    """Message that tells the trainer to continue from weights that were trained elsewhere."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Message from the trainer that it wrote a new drafter to a file, which the receiver moves."""

    path: str
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Message from the trainer with its totals since the drafter was created.

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
