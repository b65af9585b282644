"""Record of KV blocks kept across weights updates, with their weights versions (EngineCore).

Runs in EngineCore. A chain is all requests with the same private `cache_salt` and the option to
keep KV; nobody else's requests have the hashes of its blocks. Its cached blocks remain after an
update that keeps them. Activations of weights are numbered, because a label may be used again for
other weights. A block that was filled across updates has KV of several activations. It is as old as
the oldest KV that it attended to.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypedDict

from engine.kv_lifetime.keep_option import OlderKv, keep_option
from engine.types.feature_stats import KeptKvDropReason

Groups = Sequence[Sequence[Any]]
"""Blocks of a cache hit in each KV cache group."""


class Snapshot(TypedDict):
    """Counters of `engine.types.feature_stats.KeptKvStats`."""

    num_kept_tokens: int
    num_reused_tokens: int
    num_dropped_tokens: dict[KeptKvDropReason, int]


@dataclass(frozen=True, slots=True)
class KvSpan:
    """KV at consecutive positions of a request up to `end`.

    `activation` is the number of the activation whose weights computed it, `oldest` the lowest
    number among this KV and the KV that it attended to.
    """

    activation: int
    oldest: int
    end: int


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """Cached block of a chain. It is valid while it has this hash.

    `spans` are all KV up to its end, to which it attended.
    """

    block_hash: Any
    spans: list[KvSpan]
    oldest: int
    num_tokens: int
    max_lag: int | None

    def is_consistent_with(self, other: "KeptBlock") -> bool:
        """True if both depend on the same KV up to the end of the one that ends first."""
        shorter, longer = sorted((self.spans, other.spans), key=lambda spans: spans[-1].end)
        return _cut(longer, shorter[-1].end) == shorter


class KeptBlocks:
    """Versions of the KV of an engine's requests, and of the cached blocks of chains.

    `reports` are the versions of the KV of requests that have changed since their last output.
    """

    def __init__(self, pool: Any) -> None:
        self.reports: dict[str, OlderKv] = {}
        self._pool = pool
        self._activation = 0
        self._labels: dict[int, str] = {self._activation: ""}
        self._older_kv: dict[str, list[KvSpan]] = {}
        self._blocks: dict[int, KeptBlock] = {}
        self._num_kept_tokens = 0
        self._num_reused_tokens = 0
        self._num_dropped_tokens: Counter[KeptKvDropReason] = Counter()

    def set_version(self, version: str) -> None:
        """Record the weights version under which the next steps run, as a new activation."""
        self._activation += 1
        self._labels[self._activation] = version

    def on_cached(self, request: Any, blocks: Sequence[Any], first: int, block_size: int) -> None:
        """Record the versions of blocks that a request has cached, the first of them at `first`."""
        option = keep_option(request)
        if option is None:
            return
        for index, block in enumerate(blocks, first):
            if not block.is_null and block.block_hash is not None:
                spans = self._computed(request.request_id, (index + 1) * block_size)
                oldest = min(span.oldest for span in spans)
                self.on_removed(block)
                self._num_kept_tokens += block_size
                self._blocks[block.block_id] = KeptBlock(
                    block.block_hash, spans, oldest, block_size, option["max_lag"]
                )

    def on_removed(self, block: Any) -> None:
        """Record that a block is no longer in the prefix cache."""
        if (kept := self._blocks.pop(block.block_id, None)) is not None:
            self._num_kept_tokens -= kept.num_tokens

    def on_reset(self) -> None:
        """Record that no block is in the prefix cache any more."""
        if self._num_kept_tokens:
            self._num_dropped_tokens["reset"] += self._num_kept_tokens
        self._blocks.clear()
        self._num_kept_tokens = 0

    def drop_too_old(self, request: Any, groups: Groups) -> bool:
        """Remove the blocks of a cache hit that the request may not read; true if there are any.

        Blocks that other requests have cached under the same hashes are found instead.
        """
        if (option := keep_option(request)) is None:
            return False
        older = self._older_blocks(groups)
        reason: KeptKvDropReason = "lag"
        dropped = [block for block, kept in older if self._is_too_old(kept, option["max_lag"])]
        if older and not dropped:
            reason, dropped = "prefix_recomputed", self._inconsistent(groups)
        for block in dropped:
            self._num_dropped_tokens[reason] += self._blocks[block.block_id].num_tokens
            self.on_removed(block)
            removed = self._pool._remove_cached_block_hashes(block)
            self._pool._emit_block_removed_events(removed)
        return bool(dropped)

    def _is_too_old(self, kept: KeptBlock, max_lag: int | None) -> bool:
        return max_lag is not None and self._lag(kept) > max_lag

    def on_lookup(self, request: Any, groups: Groups, num_tokens: int) -> None:
        """Record the versions of the KV that a request has found in the prefix cache."""
        keeps = keep_option(request) is not None
        older = self._hit(groups, num_tokens) if keeps else []
        request_id = request.request_id
        if older == self._older_kv.get(request_id, []):
            return
        self.reports[request_id] = self._labelled(older)
        if older:
            self._older_kv[request_id] = older
        else:
            del self._older_kv[request_id]

    def on_allocated(self, request_id: str) -> None:
        """Count the older KV that the request reads, which it has found at its last lookup."""
        older = self._older_kv.get(request_id)
        self._num_reused_tokens += older[-1].end if older else 0

    def on_finished(self, request_id: str) -> None:
        self._older_kv.pop(request_id, None)

    def before_update(self, requests: Iterable[tuple[str, int, bool]]) -> None:
        """Record that all KV computed so far may be older than the weights from now on.

        `requests` are ids with the number of computed tokens; the last value is true for requests
        that have generated tokens with KV that is lost, as they were preempted.
        """
        alive = set[str]()
        for request_id, num_computed, is_preempted in requests:
            alive.add(request_id)
            if num_computed:
                older = self._computed(request_id, num_computed)
                self._older_kv[request_id] = older
                self.reports[request_id] = self._labelled(older)
            elif is_preempted:
                self._older_kv.pop(request_id, None)
                self.reports[request_id] = []
        for ended in self._older_kv.keys() - alive:
            del self._older_kv[ended]
        for ended in self.reports.keys() - alive:
            del self.reports[ended]

    def blocks_to_keep(self, *, keep: bool) -> set[int]:
        """Ids of cached blocks that an update keeps; the others are no longer known."""
        valid = {i: kept for i, kept in self._blocks.items() if self._is_valid(i, kept)}
        kept = {i: each for i, each in valid.items() if keep and self._may_stay(each)}
        self._num_kept_tokens = _num_tokens(kept)
        if num_dropped := _num_tokens(valid) - self._num_kept_tokens:
            self._num_dropped_tokens["lag" if keep else "reset"] += num_dropped
        self._blocks = kept
        self._drop_unused_labels()
        return set(kept)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            num_kept_tokens=self._num_kept_tokens,
            num_reused_tokens=self._num_reused_tokens,
            num_dropped_tokens=dict(self._num_dropped_tokens),
        )

    def _computed(self, request_id: str, end: int) -> list[KvSpan]:
        """KV of a request up to `end`."""
        older = self._older_kv.get(request_id, [])
        oldest = min((span.oldest for span in older), default=self._activation)
        return _cut(_joined([*older, KvSpan(self._activation, oldest, end)]), end)

    def _inconsistent(self, groups: Groups) -> list[Any]:
        """Blocks of a hit that depend on other KV than the blocks in front or other groups have.

        That was computed again for a request with a lower limit, or after an eviction.
        """
        last: list[tuple[Any, KeptBlock]] = []
        for group in groups:
            known = list(self._known([group]))
            for (_, front), (block, kept) in pairwise(known):
                if not kept.is_consistent_with(front):
                    return [block]
            last += known[-1:]
        is_consistent = all(kept.is_consistent_with(last[0][1]) for _, kept in last)
        return [] if is_consistent else [block for block, _ in last]

    def _drop_unused_labels(self) -> None:
        known = (*(kept.spans for kept in self._blocks.values()), *self._older_kv.values())
        used = {self._activation, *(span.activation for spans in known for span in spans)}
        self._labels = {number: self._labels[number] for number in used}

    def _lag(self, kept: KeptBlock) -> int:
        """Number of activations since the oldest KV that a block depends on was computed."""
        return self._activation - kept.oldest

    def _may_stay(self, kept: KeptBlock) -> bool:
        """True if a chain may read a block after the next update."""
        return kept.max_lag is None or self._lag(kept) + 1 <= kept.max_lag

    def _is_valid(self, block_id: int, kept: KeptBlock) -> bool:
        return bool(self._pool.blocks[block_id].block_hash == kept.block_hash)

    def _known(self, groups: Groups) -> Iterator[tuple[Any, KeptBlock]]:
        """Blocks of a hit without those of which a window needs no KV."""
        for blocks in groups:
            for block in blocks:
                kept = self._blocks.get(block.block_id)
                if kept is not None and kept.block_hash == block.block_hash:
                    yield block, kept

    def _older_blocks(self, groups: Groups) -> list[tuple[Any, KeptBlock]]:
        """Blocks of a hit that depend on older weights."""
        return [found for found in self._known(groups) if found[1].oldest < self._activation]

    def _hit(self, groups: Groups, num_tokens: int) -> list[KvSpan]:
        """KV that a hit depends on, if any of it is older; its blocks are consistent."""
        found = (kept.spans for _, kept in self._older_blocks(groups))
        spans = max(found, key=lambda spans: spans[-1].end, default=[])
        return _cut(spans, min(spans[-1].end, num_tokens)) if spans else []

    def _labelled(self, older: Sequence[KvSpan]) -> OlderKv:
        labelled: OlderKv = []
        for span in older:
            label = self._labels[span.activation]
            if labelled and labelled[-1][0] == label:
                labelled.pop()
            labelled.append((label, span.end))
        return labelled


def _num_tokens(blocks: Mapping[int, KeptBlock]) -> int:
    return sum(kept.num_tokens for kept in blocks.values())


def _end(span: KvSpan) -> int:
    return span.end


def _cut(spans: Sequence[KvSpan], end: int) -> list[KvSpan]:
    """KV up to `end`."""
    index = bisect_left(spans, end, key=_end)
    return [*spans[:index], KvSpan(spans[index].activation, spans[index].oldest, end)]


def _joined(spans: Iterable[KvSpan]) -> list[KvSpan]:
    """Spans without empty ones, and with equal neighbours as one."""
    joined: list[KvSpan] = []
    for span in spans:
        last = joined[-1] if joined else None
        if span.end <= (last.end if last else 0):
            continue
        if last and (last.activation, last.oldest) == (span.activation, span.oldest):
            joined.pop()
        joined.append(span)
    return joined
