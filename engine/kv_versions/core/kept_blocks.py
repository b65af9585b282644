"""KV blocks that chains keep across weights updates, and the weights versions of requests' KV.

Runs in EngineCore. A chain is all requests with the same private `cache_salt` and the option to
keep KV; nobody else's requests have the hashes of its blocks. Its cached blocks remain after an
update that keeps them. Activations of weights are numbered, because a label may be used again for
other weights. The KV of a block counts as that of its oldest position, and is as old as the oldest
KV that it attended to.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from engine.feature_stats import KeptKvDropReason
from engine.kv_versions.divergence_limit import MeasuredDivergence
from engine.kv_versions.request_option import KeepOption, KvReport, OlderKv, keep_option

Groups = Sequence[tuple[Sequence[Any], int]]
"""Blocks of a cache hit in each KV cache group, with the block size."""
Runs = tuple[tuple[int, int], ...]
"""Numbers of the activations that computed consecutive blocks, each with its end position."""


class Snapshot(TypedDict):
    """Counters of `engine.feature_stats.KeptKvStats`."""

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
    """Cached block of a chain, with the numbers of `KvSpan`. It is valid while it has this hash.

    `before` are the activations of the blocks in front of it, to whose KV it attended.
    """

    block_hash: Any
    activation: int
    oldest: int
    num_tokens: int
    max_lag: int | None
    before: Runs


@dataclass(frozen=True, slots=True)
class Report:
    """Versions of a request's older KV, and the lowest number of an activation among them."""

    versions: OlderKv
    oldest: int


class KeptBlocks:
    """Versions of the KV of an engine's requests, and of the cached blocks of chains.

    `reports` are the versions of the KV of requests that have changed since their last output.
    `divergence` has been measured since the last update.
    """

    def __init__(self, pool: Any) -> None:
        self.reports: dict[str, Report] = {}
        self.divergence = MeasuredDivergence()
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
        self.divergence.set([])

    def pop_report(self, request_id: str) -> KvReport | None:
        """The report of a request whose output is sent now."""
        if (report := self.reports.pop(request_id, None)) is None:
            return None
        return KvReport(versions=report.versions, lag=self._activation - report.oldest)

    def on_cached(self, request: Any, blocks: Sequence[Any], first: int, block_size: int) -> None:
        """Record the versions of blocks that a request has cached, the first of them at `first`."""
        option = keep_option(request)
        if option is None:
            return
        for index, block in enumerate(blocks, first):
            if not block.is_null and block.block_hash is not None:
                start = index * block_size
                activation, oldest = self._ages(request.request_id, start, start + block_size)
                self.on_removed(block)
                self._num_kept_tokens += block_size
                before = self._runs(request.request_id, start, block_size)
                self._blocks[block.block_id] = KeptBlock(
                    block.block_hash, activation, oldest, block_size, option["max_lag"], before
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
        dropped = [
            (block, reason)
            for block, kept, _ in self._older_blocks(groups)
            if (reason := self._drop_reason(kept, option)) is not None
        ]
        dropped = dropped or [(block, "prefix_recomputed") for block in self._detached(groups)]
        for block, reason in dropped:
            self._num_dropped_tokens[reason] += self._blocks[block.block_id].num_tokens
            self.on_removed(block)
            removed = self._pool._remove_cached_block_hashes(block)
            self._pool._emit_block_removed_events(removed)
        return bool(dropped)

    def _drop_reason(self, kept: KeptBlock, option: KeepOption) -> KeptKvDropReason | None:
        """Limit of a request that a block exceeds."""
        lag, max_lag, max_kl = self._lag(kept), option["max_lag"], option["max_kl"]
        if max_lag is not None and lag > max_lag:
            return "lag"
        if max_kl is not None and lag > self.divergence.max_lag(option["owner"], max_kl):
            return "divergence"
        return None

    def on_lookup(self, request: Any, groups: Groups, num_tokens: int) -> None:
        """Record the versions of the KV that a request has found in the prefix cache."""
        keeps = keep_option(request) is not None
        older = self._hit(groups, num_tokens) if keeps else []
        request_id = request.request_id
        if older == self._older_kv.get(request_id, []):
            return
        self.reports[request_id] = self._report(older)
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
                _, oldest = self._ages(request_id, 0, num_computed)
                computed = KvSpan(self._activation, oldest, num_computed)
                older = _joined([*self._older_kv.get(request_id, ()), computed])
                self._older_kv[request_id] = older
                self.reports[request_id] = self._report(older)
            elif is_preempted:
                self._older_kv.pop(request_id, None)
                self.reports[request_id] = self._report([])
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

    def _ages(self, request_id: str, start: int, end: int) -> tuple[int, int]:
        """The two numbers of `KvSpan` for the KV at positions `start` to `end` of a request."""
        activation = oldest = self._activation
        begin = 0
        for span in self._older_kv.get(request_id, ()):
            if begin < end:
                oldest = min(oldest, span.oldest)
                activation = min(activation, span.activation) if span.end > start else activation
            begin = span.end
        return activation, oldest

    def _runs(self, request_id: str, end: int, block_size: int) -> Runs:
        """Activations of the blocks of a request up to `end`, each that of its oldest position."""
        runs: list[tuple[int, int]] = []
        begin = 0
        now = KvSpan(self._activation, self._activation, end)
        for span in (*self._older_kv.get(request_id, ()), now):
            first, stop = begin // block_size * block_size, min(span.end, end)
            if stop > begin:
                _add_run(runs, span.activation, first, -(-stop // block_size) * block_size)
                begin = stop
        return tuple(runs)

    def _detached(self, groups: Groups) -> Iterator[Any]:
        """The first block of a hit that attended to other KV than that of the blocks in front.

        Those have been computed again for a request with a lower limit. Groups whose first blocks
        are not cached, as with sliding windows, are not checked.
        """
        for blocks, block_size in groups:
            runs: list[tuple[int, int]] = []
            for index, block in enumerate(blocks):
                if block.is_null:
                    break
                kept = self._blocks.get(block.block_id)
                if kept is None or kept.block_hash != block.block_hash:
                    break
                if kept.before != tuple(runs):
                    yield block
                    break
                start = index * block_size
                _add_run(runs, kept.activation, start, start + block_size)

    def _drop_unused_labels(self) -> None:
        used = {self._activation, *(kept.activation for kept in self._blocks.values())}
        used |= {span.activation for older in self._older_kv.values() for span in older}
        self._labels = {number: self._labels[number] for number in used}

    def _lag(self, kept: KeptBlock) -> int:
        """Number of activations since the oldest KV that a block depends on was computed."""
        return self._activation - kept.oldest

    def _may_stay(self, kept: KeptBlock) -> bool:
        """True if a chain may read a block after the next update."""
        return kept.max_lag is None or self._lag(kept) + 1 <= kept.max_lag

    def _is_valid(self, block_id: int, kept: KeptBlock) -> bool:
        return bool(self._pool.blocks[block_id].block_hash == kept.block_hash)

    def _older_blocks(self, groups: Groups) -> Iterator[tuple[Any, KeptBlock, int]]:
        """Blocks of a hit that depend on older weights, with their start."""
        for blocks, block_size in groups:
            for index, block in enumerate(blocks):
                kept = self._blocks.get(block.block_id)
                if kept is None or kept.block_hash != block.block_hash:
                    continue
                if kept.oldest < self._activation:
                    yield block, kept, index * block_size

    def _hit(self, groups: Groups, num_tokens: int) -> list[KvSpan]:
        """KV of a hit, up to the last position that is not of the served weights alone."""
        unit = min((block_size for _, block_size in groups), default=1)
        now = (self._activation, self._activation)
        ages: dict[int, tuple[int, int]] = {}
        for _, kept, start in self._older_blocks(groups):
            for position in range(start, min(start + kept.num_tokens, num_tokens), unit):
                activation, oldest = ages.get(position, now)
                ages[position] = min(activation, kept.activation), min(oldest, kept.oldest)
        starts = range(0, max(ages, default=-unit) + unit, unit)
        return _joined(
            KvSpan(*ages.get(start, now), end=min(start + unit, num_tokens)) for start in starts
        )

    def _report(self, older: Sequence[KvSpan]) -> Report:
        oldest = min((span.oldest for span in older), default=self._activation)
        return Report(self._labelled(older), oldest)

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


def _add_run(runs: list[tuple[int, int]], activation: int, start: int, end: int) -> None:
    """Add blocks from `start` to `end`; a block that the last run has, too, counts as older."""
    if runs and runs[-1][1] > start:
        last, shared_end = runs.pop()
        _add_run(runs, last, runs[-1][1] if runs else 0, start)
        _add_run(runs, min(last, activation), start, shared_end)
        start = shared_end
    if end <= start:
        return
    if runs and runs[-1][0] == activation:
        runs.pop()
    runs.append((activation, end))


def _joined(spans: Iterable[KvSpan]) -> list[KvSpan]:
    """Spans without empty ones, and with equal neighbours as one."""
    joined: list[KvSpan] = []
    for span in spans:
        if joined and joined[-1].end >= span.end:
            continue
        last = joined[-1] if joined else None
        if last is not None and (last.activation, last.oldest) == (span.activation, span.oldest):
            joined.pop()
        joined.append(span)
    return joined
