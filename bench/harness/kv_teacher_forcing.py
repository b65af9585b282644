"""Teacher forcing over KV that several weights versions computed, as `kv_versions` states it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.types.samples import KvVersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Tokens that one weights version sampled after a context, with their returned logprobs."""

    version: str
    token_ids: list[int]
    """Context and sampled tokens."""
    logprobs: list[float]
    kv_versions: Sequence[KvVersionSpan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """Comparison of a turn with teacher forcing, one value for each sampled token."""

    log_ratio_stated: list[float]
    """Returned logprob minus that over the KV of `kv_versions`."""
    log_ratio_exact: list[float]
    """Returned logprob minus that over exact KV, which the version of the turn computes alone."""
    kl: list[float]
    """KL divergence of the distribution over the KV of `kv_versions` from that over exact KV."""
    expected_ratio: list[float]
    """Expectation of the ratio of both probabilities, for tokens of the former distribution."""


class Teacher:
    """Reference model in float32 for each weights version."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._models = {
            version: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for version, path in paths.items()
        }

    def force(self, turn: Turn) -> Forced:
        num_positions = len(turn.token_ids) - 1
        exact = KvVersionSpan(version=turn.version, start=0, end=num_positions)
        stated = self._rows(turn, turn.kv_versions)
        is_exact = list(turn.kv_versions) == [exact]
        over_exact = stated if is_exact else self._rows(turn, [exact])
        differences = stated - over_exact
        return Forced(
            log_ratio_stated=_log_ratios(turn, stated),
            log_ratio_exact=_log_ratios(turn, over_exact),
            kl=(stated.exp() * differences).sum(dim=1).tolist(),
            expected_ratio=(stated + differences).exp().sum(dim=1).tolist(),
        )

    def _rows(self, turn: Turn, spans: Sequence[KvVersionSpan]) -> torch.Tensor:
        """Log-probabilities of all tokens of the vocabulary, one row for each sampled token."""
        assert not any(span.first_token for span in spans), "the KV was computed again"
        cache, rows = None, []
        with torch.inference_mode():
            for span in spans:
                part = torch.tensor([turn.token_ids[span.start : span.end]])
                model: Any = self._models[span.version]
                output = model(part, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                rows.append(output.logits[0])
        return torch.cat(rows)[-len(turn.logprobs) :].double().log_softmax(dim=1)


def _log_ratios(turn: Turn, rows: torch.Tensor) -> list[float]:
    sampled = torch.tensor(turn.token_ids[-len(turn.logprobs) :])
    found = torch.tensor(turn.logprobs) - rows.gather(1, sampled[:, None])[:, 0]
    ratios: list[float] = found.tolist()
    return ratios
