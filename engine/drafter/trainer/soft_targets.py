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

from engine.protocol import TopLogprobs

TOP_K: Final = 8
"""At a place. A drafter's token is one of the likeliest; samples are held by the thousand."""


class TopK(NamedTuple):
    """[places, KEPT] both. Where fewer are known, the first again with a mass of zero."""

    tokens: NDArray[np.int32]
    probs: NDArray[np.float32]


def top_k_of(token_top_logprobs: Sequence[TopLogprobs]) -> TopK:
    found = TopK(
        tokens=np.zeros((len(token_top_logprobs), TOP_K), np.int32),
        probs=np.zeros((len(token_top_logprobs), TOP_K), np.float32),
    )
    for row, place in enumerate(token_top_logprobs):
        # The sampled token is there a second time if it is one of the likeliest.
        known = {entry.token_id: entry.logprob for entry in place}
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
