"""Byte format of extra logprobs per token: raw logprobs, and those of given token ids.

vLLM returns either the top logprobs of a request or those of given token ids, and `logprobs_mode`
is an option of the engine. Here a request has the top logprobs of the sampling distribution from
vLLM, and besides them, before the support of each token, values of 4 bytes:

    float32      raw logprob of the token
    int32    k   token ids of the highest raw logprobs
    float32  k   their raw logprobs
    float32  m   logprobs of the given token ids: raw, if raw ones were requested

Raw logprobs are those of the model: before a grammar and all other logits processing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

GIVEN_ARG = "coppice_logprob_token_ids"
RAW_ARG = "coppice_num_raw_logprobs"
LogprobsAt = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logprobs [n, k] of token ids [n, k] under the distributions of scores [n, v]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedLogprobs:
    """Requested logprobs that a request returns per token.

    `num_raw` is the number of the highest raw logprobs; None if no raw ones are returned.
    """

    given: tuple[int, ...] = ()
    num_raw: int | None = None

    @property
    def width(self) -> int:
        """Number of values per token."""
        return (0 if self.num_raw is None else 1 + 2 * self.num_raw) + len(self.given)

    def to_extra_args(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.given:
            found[GIVEN_ARG] = list(self.given)
        if self.num_raw is not None:
            found[RAW_ARG] = self.num_raw
        return found

    def gather(
        self, scores_nv: torch.Tensor, tokens_n: torch.Tensor, logprobs_at: LogprobsAt
    ) -> torch.Tensor:
        """Values [n, width] of n sampled tokens as int32, which floats are cast to by bits.

        `scores_nv` are logprobs, or logits: of the model if raw ones are returned, otherwise of
        the sampling distribution. `logprobs_at` computes logprobs of token ids from them.
        """
        given = torch.tensor(self.given, dtype=torch.int64, device=scores_nv.device)
        ids_nm = given.expand(len(tokens_n), -1)
        if self.num_raw is None:
            return _bits(logprobs_at(scores_nv, ids_nm))
        top_nk = scores_nv.topk(self.num_raw, dim=-1).indices
        values = logprobs_at(scores_nv, torch.cat([tokens_n.long()[:, None], top_nk, ids_nm], 1))
        return torch.cat([_bits(values[:, :1]), top_nk.int(), _bits(values[:, 1:])], dim=1)

    def fits(self, row: bytes) -> bool:
        return len(row) >= 4 * self.width

    def split(self, rows: Sequence[bytes]) -> "LogprobValues":
        """Values of the tokens of a request, whose encoded rows begin with them."""
        num_bytes = 4 * self.width
        data = b"".join(row[:num_bytes] for row in rows)
        values = np.frombuffer(data, np.int32).reshape(len(rows), self.width)
        num_raw, first = self.num_raw or 0, self.width - len(self.given)
        return LogprobValues(
            given=values[:, first:].view(np.float32),
            raw=None if self.num_raw is None else values[:, 0].view(np.float32),
            raw_top_ids=values[:, 1 : 1 + num_raw],
            raw_top=values[:, 1 + num_raw : first].view(np.float32),
            supports=[row[num_bytes:] for row in rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobValues:
    """Requested logprobs of a request's tokens, and what follows them."""

    given: NDArray[np.float32]
    raw: NDArray[np.float32] | None
    raw_top_ids: NDArray[np.int32]
    raw_top: NDArray[np.float32]
    supports: list[bytes]


def requested_logprobs(args: Mapping[str, Any]) -> RequestedLogprobs:
    """Requested logprobs that a request returns, by the `extra_args` of its SamplingParams."""
    return RequestedLogprobs(given=tuple(args.get(GIVEN_ARG, ())), num_raw=args.get(RAW_ARG))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.float().contiguous().view(torch.int32)
