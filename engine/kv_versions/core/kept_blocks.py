"""KV blocks that chains keep across weights updates, and the weights versions of requests' KV.

Runs in EngineCore. A chain is all requests with the same private `cache_salt` and the option to
keep KV; nobody else's requests have the hashes of its blocks. Its cached blocks remain after an
update that keeps them. The KV of a block counts as that of its oldest position.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from engine.feature_stats import KeptKvDropReason
from engine.kv_versions.request_option import OlderKv, keep_option


class Snapshot(TypedDict):
    """Counters of `engine.feature_stats.KeptKvStats`."""

    num_kept_tokens: int
    num_reused_tokens: int
    num_dropped_tokens: dict[KeptKvDropReason, int]


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """Cached block of a chain. It is valid while the block has this hash."""

    block_hash: Any
    version: str
    num_tokens: int
    max_lag: int | None


class KeptBlocks:
    """Versions of the KV of an engine's requests, and of the cached blocks of chains.

    `older_kv` has the requests whose KV is not all of the served version; `reports` are those of
    them that have changed since the request's last output. `can_truncate`: a prefix of a cache hit
    is a cache hit, which holds for models with full attention only.
    """

    def __init__(self, pool: Any, *, can_truncate: bool) -> None:
        self.version = ""
        self.reports: dict[str, OlderKv] = {}
        self._pool = pool
        self._can_truncate = can_truncate
        self._updates: dict[str, int] = {self.version: 0}
        self._num_updates = 0
        self._older_kv: dict[str, OlderKv] = {}
        self._blocks: dict[int, KeptBlock] = {}
        self._num_reused_tokens = 0
        self._num_dropped_tokens: Counter[KeptKvDropReason] = Counter()

    def set_version(self, version: str) -> None:
        """Record the weights version under which the next steps run."""
        if version != self.version:
            self._num_updates += 1
        self.version = version
        self._updates[version] = self._num_updates

    def lag(self, version: str) -> int:
        """Number of weights updates since a version was served last."""
        return self._num_updates - self._updates[version]

    def on_cached(self, request: Any, blocks: Sequence[Any], first: int, block_size: int) -> None:
        """Record the versions of blocks that a request has cached, the first of them at `first`."""
        option = keep_option(request)
        if option is None:
            return
        older = self._older_kv.get(request.request_id, ())
        for index, block in enumerate(blocks, first):
            if not block.is_null and block.block_hash is not None:
                version = self._oldest(older, index * block_size, (index + 1) * block_size)
                self._blocks[block.block_id] = KeptBlock(
                    block.block_hash, version, block_size, option["max_lag"]
                )

    def on_lookup(
        self, request: Any, groups: Sequence[tuple[Sequence[Any], int]], num_tokens: int
    ) -> int:
        """Number of tokens of a cache hit that the request may read; records their versions.

        `groups` are the blocks of each KV cache group, with the block size.
        """
        option = keep_option(request)
        if option is None:
            self._set_older_kv(request.request_id, [])
            return num_tokens
        num_tokens = self._num_within_lag(groups, num_tokens, option["max_lag"])
        versions = self._hit_versions(groups, num_tokens)
        self._set_older_kv(request.request_id, versions)
        self._num_reused_tokens += versions[-1][1] if versions else 0
        return num_tokens

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
                older = [*self._older_kv.get(request_id, ()), (self.version, num_computed)]
                self._older_kv[request_id] = self.reports[request_id] = _merged(older)
            elif is_preempted:
                self._older_kv.pop(request_id, None)
                self.reports[request_id] = []
        for known in (self._older_kv, self.reports):
            for request_id in known.keys() - alive:
                del known[request_id]

    def blocks_to_keep(self, *, keep: bool) -> set[int]:
        """Ids of cached blocks that an update keeps; the others are no longer known."""
        valid = {i: kept for i, kept in self._blocks.items() if self._is_valid(i, kept)}
        kept = {i: each for i, each in valid.items() if keep and self._may_stay(each)}
        reason: KeptKvDropReason = "lag" if keep else "reset"
        for block_id in valid.keys() - kept.keys():
            self._num_dropped_tokens[reason] += valid[block_id].num_tokens
        self._blocks = kept
        self._drop_unused_versions()
        return set(kept)

    def num_kept_tokens(self) -> int:
        """Number of cached tokens of chains, of any version."""
        valid = (kept for i, kept in self._blocks.items() if self._is_valid(i, kept))
        return sum(kept.num_tokens for kept in valid)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            num_kept_tokens=self.num_kept_tokens(),
            num_reused_tokens=self._num_reused_tokens,
            num_dropped_tokens=dict(self._num_dropped_tokens),
        )

    def _oldest(self, older: Sequence[tuple[str, int]], start: int, end: int) -> str:
        """Oldest version of the KV at positions `start` to `end` of a request."""
        found, begin = list[str](), 0
        for version, stop in older:
            if begin < end and stop > start:
                found.append(version)
            begin = stop
        if begin < end:
            found.append(self.version)
        return max(found, key=self.lag)

    def _drop_unused_versions(self) -> None:
        used = {self.version, *(kept.version for kept in self._blocks.values())}
        used |= {version for older in self._older_kv.values() for version, _ in older}
        self._updates = {version: self._updates[version] for version in used}

    def _may_stay(self, kept: KeptBlock) -> bool:
        """True if a chain may read a block after the next update."""
        return kept.max_lag is None or self.lag(kept.version) + 1 <= kept.max_lag

    def _is_valid(self, block_id: int, kept: KeptBlock) -> bool:
        return bool(self._pool.blocks[block_id].block_hash == kept.block_hash)

    def _version_of(self, block: Any) -> str:
        kept = self._blocks.get(block.block_id)
        return kept.version if kept and kept.block_hash == block.block_hash else self.version

    def _num_within_lag(
        self, groups: Sequence[tuple[Sequence[Any], int]], num_tokens: int, max_lag: int | None
    ) -> int:
        """Tokens of a hit before the first block that is too old; such blocks are dropped."""
        if max_lag is None:
            return num_tokens
        ends = [num_tokens]
        for blocks, block_size in groups:
            for index, block in enumerate(blocks):
                if not block.is_null and self.lag(self._version_of(block)) > max_lag:
                    ends.append(index * block_size)
                    self._drop(block)
        end = min(ends)
        return end if self._can_truncate or end == num_tokens else 0

    def _drop(self, block: Any) -> None:
        """Remove a block from the prefix cache, so that its successor is found instead."""
        kept = self._blocks.pop(block.block_id)
        self._num_dropped_tokens["lag"] += kept.num_tokens
        removed = self._pool._remove_cached_block_hashes(block)
        self._pool._emit_block_removed_events(removed)

    def _hit_versions(
        self, groups: Sequence[tuple[Sequence[Any], int]], num_tokens: int
    ) -> OlderKv:
        """Versions of a hit's positions, up to the last one that is not of the served version."""
        size = min((block_size for _, block_size in groups), default=1)
        versions = [
            (self._version_at(groups, start), min(start + size, num_tokens))
            for start in range(0, num_tokens, size)
        ]
        while versions and versions[-1][0] == self.version:
            versions.pop()
        return _merged(versions)

    def _version_at(self, groups: Sequence[tuple[Sequence[Any], int]], position: int) -> str:
        found = [self.version]
        for blocks, block_size in groups:
            index = position // block_size
            if index < len(blocks) and not blocks[index].is_null:
                found.append(self._version_of(blocks[index]))
        return max(found, key=self.lag)

    def _set_older_kv(self, request_id: str, older: OlderKv) -> None:
        if older == self._older_kv.get(request_id, []):
            return
        self.reports[request_id] = older
        if older:
            self._older_kv[request_id] = older
        else:
            del self._older_kv[request_id]


def _merged(versions: Iterable[tuple[str, int]]) -> OlderKv:
    merged: OlderKv = []
    for version, end in versions:
        if merged and (merged[-1][0] == version or merged[-1][1] >= end):
            version, end = merged[-1][0], max(merged.pop()[1], end)
        merged.append((version, end))
    return merged
