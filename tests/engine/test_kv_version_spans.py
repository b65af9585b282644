"""Spans of KV versions, from the reports of EngineCore."""

from engine.kv_lifetime.version_spans import Reports, cut_kv_versions, kv_version_spans
from engine.types.samples import KvVersionSpan, VersionSpan

Span = tuple[str, int, int, int]


def versions(*spans: tuple[str, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in spans)


def spans_of(reports: Reports, *spans: tuple[str, int, int]) -> list[Span]:
    """Spans of a sample with a prompt of ten tokens."""
    return [_plain(span) for span in kv_version_spans(reports, versions(*spans), 10)]


def _plain(span: KvVersionSpan) -> Span:
    return span.version, span.start, span.end, span.first_token


def test_sample_without_reports_has_kv_of_its_version() -> None:
    assert spans_of((), ("v1", 0, 5)) == [("v1", 0, 14, 0)]
    assert spans_of(()) == []


def test_sample_that_keeps_its_kv_over_an_update() -> None:
    assert spans_of([(3, [("v1", 12)])], ("v1", 0, 3), ("v2", 3, 5)) == [
        ("v1", 0, 12, 0),
        ("v2", 12, 14, 0),
    ]


def test_sample_that_found_kv_of_its_chain() -> None:
    found = spans_of([(0, [("v1", 4), ("v2", 8)])], ("v3", 0, 2))
    assert found == [("v1", 0, 4, 0), ("v2", 4, 8, 0), ("v3", 8, 11, 0)]


def test_prompt_that_was_prefilled_across_an_update() -> None:
    assert spans_of([(0, [("v1", 6)])], ("v2", 0, 1)) == [("v1", 0, 6, 0), ("v2", 6, 10, 0)]


def test_kv_that_is_computed_again_holds_for_later_tokens_only() -> None:
    assert spans_of([(3, [])], ("v1", 0, 3), ("v2", 3, 5)) == [
        ("v1", 0, 12, 0),
        ("v2", 0, 14, 3),
    ]


def test_recomputation_after_an_update_that_kept_the_kv() -> None:
    found = spans_of([(3, [("v1", 12)]), (4, [])], ("v1", 0, 3), ("v2", 3, 6))
    assert found == [("v1", 0, 12, 0), ("v2", 12, 13, 0), ("v2", 0, 15, 4)]


def test_report_after_the_last_token_is_ignored() -> None:
    assert spans_of([(5, [("v1", 14)])], ("v1", 0, 5)) == [("v1", 0, 14, 0)]


def test_spans_of_a_sample_that_loses_its_last_tokens() -> None:
    spans = kv_version_spans([(3, [])], versions(("v1", 0, 3), ("v2", 3, 5)), 10)
    assert [_plain(span) for span in cut_kv_versions(spans, 10, 4)] == [
        ("v1", 0, 12, 0),
        ("v2", 0, 13, 3),
    ]
    assert [_plain(span) for span in cut_kv_versions(spans, 10, 2)] == [("v1", 0, 11, 0)]
    assert cut_kv_versions(spans, 10, 0) == ()


def test_neighbours_of_one_version_are_one_span() -> None:
    """A label may be activated again, so that older KV has the label of the served weights."""
    assert spans_of([(0, [("v1", 4), ("v1", 8)])], ("v1", 0, 2)) == [("v1", 0, 11, 0)]
