"""What else could have come: the likeliest tokens at each place of a response, as recorded.

A request that asks for them has them recorded, and so has a tree that is cut by entropy. They are
of the law that was sampled from, temperature and truncation included: that by which drafts are
accepted. What is beyond those kept is one outcome more, "another token".

They travel as text, and stay text until they are trained on. No torch here.
"""

import base64
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.protocol import Place

KEPT: Final = 8
"""At a place. A drafter's token is one of the likeliest; samples are held by the thousand."""


class Likeliest(NamedTuple):
    """[places, KEPT] both. Where fewer are known, the first again with a mass of zero."""

    tokens: NDArray[np.int32]
    masses: NDArray[np.float32]


def recorded(places: Sequence[Place]) -> Likeliest:
    found = Likeliest(
        tokens=np.zeros((len(places), KEPT), np.int32),
        masses=np.zeros((len(places), KEPT), np.float32),
    )
    for row, place in enumerate(places):
        # The sampled token is there a second time if it is one of the likeliest.
        known = {entry.token_id: entry.logprob for entry in place}
        best = sorted(known.items(), key=lambda entry: -entry[1])[:KEPT]
        found.tokens[row] = best[0][0] if best else 0
        found.tokens[row, : len(best)] = [token for token, _ in best]
        found.masses[row, : len(best)] = [math.exp(logprob) for _, logprob in best]
    return found


def as_text(likeliest: Likeliest) -> str:
    return base64.b64encode(likeliest.tokens.tobytes() + likeliest.masses.tobytes()).decode()


def from_text(text: str) -> Likeliest:
    content = base64.b64decode(text)
    half = len(content) // 2
    return Likeliest(
        tokens=np.frombuffer(content[:half], np.int32).reshape(-1, KEPT),
        masses=np.frombuffer(content[half:], np.float32).reshape(-1, KEPT),
    )
