"""Which draft lengths may be chosen while how many samples run.

Written as `8:0,2,4 32:0,2 0`: up to 8 samples 0, 2 or 4 drafts, up to 32 samples 0 or 2, beyond
them none. The last one has no bound.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_DRAFT_TOKENS = 127  # vLLM's MAX_SPEC_LEN, less one
_TEXT = re.compile(r"(\d+:\d+(,\d+)* )*\d+(,\d+)*")


@dataclass(frozen=True, slots=True)
class Tier:
    """`up_to`: the most samples that it holds for; None: all that are left."""

    up_to: int | None
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftLengthTiers:
    tiers: tuple[Tier, ...]

    @classmethod
    def parse(cls, text: str) -> "DraftLengthTiers":
        """ValueError says what is wrong with it."""
        if not _TEXT.fullmatch(text):
            raise ValueError("must be written as 8:0,2,4 32:0,2 0")
        tiers = tuple(_tier(part) for part in text.split(" "))
        bounds = [tier.up_to for tier in tiers if tier.up_to is not None]
        if 0 in bounds or any(b >= a for b, a in zip(bounds, bounds[1:], strict=False)):
            raise ValueError("the numbers of samples must rise, from 1 at least")
        if max(max(tier.drafts) for tier in tiers) > MAX_DRAFT_TOKENS:
            raise ValueError(f"a draft has {MAX_DRAFT_TOKENS} tokens at most")
        return cls(tiers)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """The tokens a sample that a decode step can have, from few to many."""
        return tuple(sorted({drafts + 1 for tier in self.tiers for drafts in tier.drafts}))

    def at(self, samples: int) -> tuple[int, ...]:
        return next(t.drafts for t in self.tiers if t.up_to is None or samples <= t.up_to)

    def samples(self, query_len: int, most: int) -> Iterator[int]:
        """Each number of samples, up to `most`, that may decode with `query_len` tokens each."""
        return (n for n in range(1, most + 1) if query_len - 1 in self.at(n))


def default_tiers(max_draft_tokens: int) -> DraftLengthTiers:
    """What is chosen from where nothing else is said: few lengths, small ones for many samples."""
    few = {0, max_draft_tokens} | {
        drafts for drafts in (1, 2, 4, 8, 16, 32, 64) if drafts < max_draft_tokens
    }
    return DraftLengthTiers(
        tuple(
            Tier(up_to, tuple(sorted(drafts for drafts in few if drafts <= most)))
            for up_to, most in ((8, max_draft_tokens), (32, 4), (None, 2))
        )
    )


def _tier(text: str) -> Tier:
    max_mean_cost, _, drafts = text.rpartition(":")
    return Tier(
        int(max_mean_cost) if max_mean_cost else None,
        tuple(sorted({int(d) for d in drafts.split(",")})),
    )
