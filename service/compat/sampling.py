"""Sampling parameters under the names of other servers."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from coppice.wire.base import TokenIds
from coppice.wire.rollouts import MAX_SAMPLES_PER_GROUP, MAX_TOKENS, Sampling
from service.compat.bodies import CompatModel

MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Count = Annotated[
    int,
    Field(ge=1, le=MAX_SAMPLES_PER_GROUP),
    BeforeValidator(lambda value: 1 if value is None else value),
]

_SEED_MASK = 2**62 - 1  # trainers send seeds of 63 bits


class SamplingFields(CompatModel):
    """Sampling parameters common to all APIs; the name of the token limit differs between them."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=256)] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    n: Count = 1

    def sampling(self, max_tokens: int | None) -> Sampling:
        """Native sampling parameters; top_k -1 and 0 both disable top-k."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=self.ignore_eos,
        )


def truncate_seed(seed: int | None) -> int | None:
    return None if seed is None else seed & _SEED_MASK
