"""Table of allowed draft lengths by number of running samples, and its text format."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_DRAFT_TOKENS = 127  # vLLM's MAX_SPEC_LEN - 1
_TEXT = re.compile(r"(\d+:\d+(,\d+)* )*\d+(,\d+)*")


@dataclass(frozen=True, slots=True)
class Tier:
    """Allowed draft lengths with up to `up_to` running samples; None means unbounded."""

    up_to: int | None
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftLengthTiers:
    """Draft lengths that may be chosen, by the number of running samples.

    Written as `8:0,2,4 32:0,2 0`: with up to 8 samples 0, 2 or 4 draft tokens, with up to 32
    samples 0 or 2, above that none. Tiers are in increasing order of samples; the last one is
    unbounded.
    """

    tiers: tuple[Tier, ...]

    @classmethod
    def parse(cls, text: str) -> "DraftLengthTiers":
        """Parse tiers from text; raises ValueError with the reason if it is invalid."""
        if not _TEXT.fullmatch(text):
            raise ValueError("must be written as 8:0,2,4 32:0,2 0")
        tiers = tuple(_tier(part) for part in text.split(" "))
        bounds = [tier.up_to for tier in tiers if tier.up_to is not None]
        if 0 in bounds or any(b >= a for b, a in zip(bounds, bounds[1:], strict=False)):
            raise ValueError("numbers of samples must be increasing and at least 1")
        if max(max(tier.drafts) for tier in tiers) > MAX_DRAFT_TOKENS:
            raise ValueError(f"a draft has at most {MAX_DRAFT_TOKENS} tokens")
        return cls(tiers)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Possible numbers of tokens per sample in a decode step, in increasing order."""
        return tuple(sorted({drafts + 1 for tier in self.tiers for drafts in tier.drafts}))

    def at(self, samples: int) -> tuple[int, ...]:
        return next(t.drafts for t in self.tiers if t.up_to is None or samples <= t.up_to)

    def samples(self, query_len: int, most: int) -> Iterator[int]:
        """Yield the numbers of samples, up to `most`, that may decode `query_len` tokens each."""
        return (n for n in range(1, most + 1) if query_len - 1 in self.at(n))


def default_tiers(max_draft_tokens: int) -> DraftLengthTiers:
    """Default draft lengths: few lengths, and only short ones with many running samples."""
    few = {0, max_draft_tokens} | {
        drafts for drafts in (1, 2, 4, 8, 16, 32, 64) if drafts < max_draft_tokens
    }
    return DraftLengthTiers(
        tuple(
            Tier(up_to, tuple(sorted(drafts for drafts in few if drafts <= most)))
            for up_to, most in ((8, max_draft_tokens), (32, 4), (None, 2))
        )
    )


def draft_length_schedule(lengths: Iterable[int], max_sequences: int) -> list[tuple[int, int, int]]:
    """Draft lengths per range of batch sizes, for vLLM's `speculative_config`.

    Lengths are chosen step by step and ignore this schedule. But vLLM captures CUDA graphs for the
    lengths in it (v1/worker/gpu/cudagraph_utils.py:289), so each length occurs once.
    """
    descending = sorted(lengths, reverse=True)[:max_sequences]
    schedule = [(number, number, length) for number, length in enumerate(descending, start=1)]
    return [*schedule[:-1], (len(descending), max_sequences, descending[-1])]


def _tier(text: str) -> Tier:
    up_to, _, drafts = text.rpartition(":")
    return Tier(
        int(up_to) if up_to else None,
        tuple(sorted({int(d) for d in drafts.split(",")})),
    )
