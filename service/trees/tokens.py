"""Generated tokens of a path and their metadata."""

from collections.abc import Sequence
from dataclasses import dataclass

from coppice.wire.rollouts import VersionSpan
from coppice.wire.spans import cut_spans
from engine.types import Completion
from service.rollouts.group import version_spans
from service.trees.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratedTokens:
    """Tokens with one logprob, one version and, if requested, one entropy per token."""

    token_ids: list[int]
    logprobs: list[float]
    entropy: list[float] | None
    versions: list[VersionSpan]

    def part(self, start: int, end: int) -> "GeneratedTokens":
        return GeneratedTokens(
            token_ids=self.token_ids[start:end],
            logprobs=self.logprobs[start:end],
            entropy=None if self.entropy is None else self.entropy[start:end],
            versions=cut_spans(self.versions, start, end),
        )

    def pieces(self, cuts: Sequence[int]) -> list["GeneratedTokens"]:
        """Split at ascending positions, all of them inside."""
        borders = [0, *cuts, len(self.token_ids)]
        return [self.part(start, end) for start, end in zip(borders, borders[1:], strict=False)]


def tokens_from_completion(plan: Plan, result: Completion, adapter: str | None) -> GeneratedTokens:
    return GeneratedTokens(
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        entropy=_entropy(plan, result),
        versions=version_spans(result, len(result.token_ids), adapter),
    )


def _entropy(plan: Plan, result: Completion) -> list[float] | None:
    if not plan.needs_entropy:
        return None
    if plan.entropy.source == "chosen":
        return [-logprob for logprob in result.logprobs]
    return result.entropy
