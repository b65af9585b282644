"""A draft method that proposes the successor of the last token's previous occurrence."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_DRAFTED = 4


class Proposer:
    """vLLM's `custom_class`: one draft per row, of any length."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        pass

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        return [
            following(token_ids[row, : num_tokens[row]]) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]


def following(tokens: npt.NDArray[np.int32]) -> list[int]:
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    if not len(places):
        return []
    draft: list[int] = tokens[places[-1] + 1 :][:NUM_DRAFTED].tolist()
    return draft
