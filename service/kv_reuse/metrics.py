"""Prometheus metrics of prompts with spans."""

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from coppice.wire.reuse import ReuseAnswer, ReuseMode, ReuseReason
from service.kv_reuse.anchors import AnchorOutcome, AnchorStore
from service.kv_reuse.span_cache import SpanCache
from service.kv_reuse.spans import APPROXIMATE_MODES

TOKEN_KINDS = ("reused", "computed", "prepared")
ANCHOR_REASONS = frozenset({"no_anchor", "not_shareable"})


class KvReuseMetrics:
    """KV reuse metrics; the reuse rate is reused / (reused + computed) tokens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._groups = Counter(
            "coppice_reuse_groups",
            "Groups whose prompt came in segments: done, or why it was computed whole",
            ["mode", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "coppice_reuse_tokens",
            "Tokens of those prompts, and of segments computed alone for them",
            ["mode", "kind"],
            registry=registry,
        )
        self._round_trips = Counter(
            "coppice_reuse_round_trips",
            "Requests that followed one another to their first tokens",
            ["mode"],
            registry=registry,
        )
        self._entries = Gauge(
            "coppice_reuse_segments", "Segments whose keys and values are kept", registry=registry
        )
        self._bytes = Gauge(
            "coppice_reuse_bytes",
            "Bytes that segments, anchors and prompts under way take",
            registry=registry,
        )
        self._anchors = Gauge(
            "coppice_reuse_anchors", "Prompts that others are predicted from", registry=registry
        )
        self._outcomes = Counter(
            "coppice_reuse_anchor_fates",
            "Anchors that were made, made room, died with their weights, or were not written",
            ["fate"],
            registry=registry,
        )
        self._counted: dict[AnchorOutcome, int] = dict.fromkeys(get_args(AnchorOutcome), 0)
        self._init_labels()

    def count_group(self, reuse: ReuseAnswer) -> None:
        self._groups.labels(reuse.mode, reuse.reason or "done").inc()
        for kind in TOKEN_KINDS:
            self._tokens.labels(reuse.mode, kind).inc(getattr(reuse, f"tokens_{kind}"))
        self._round_trips.labels(reuse.mode).inc(reuse.round_trips)

    def update(self, cache: SpanCache, anchors: AnchorStore) -> None:
        self._anchors.set(anchors.num_anchors)
        self._entries.set(cache.num_spans)
        self._bytes.set(cache.num_bytes)
        for fate, num_counted in self._counted.items():
            self._outcomes.labels(fate).inc(anchors.num_by_outcome[fate] - num_counted)
            self._counted[fate] = anchors.num_by_outcome[fate]

    def _init_labels(self) -> None:
        for fate in get_args(AnchorOutcome):
            self._outcomes.labels(fate)
        for mode in get_args(ReuseMode):
            self._round_trips.labels(mode)
            for outcome in ("done", *_reasons(mode)):
                self._groups.labels(mode, outcome)
            for kind in TOKEN_KINDS:
                self._tokens.labels(mode, kind)


def _reasons(mode: ReuseMode) -> list[ReuseReason]:
    if mode not in APPROXIMATE_MODES:
        return []
    return [r for r in get_args(ReuseReason) if mode == "anchors" or r not in ANCHOR_REASONS]
