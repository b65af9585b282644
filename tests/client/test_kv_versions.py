"""Slicing and concatenation of KV version spans."""

from coppice.wire.columns.kv_version_spans import KvVersionSpan, cut_kv_versions, joined_kv_versions

Span = tuple[str, int, int, int]
WHOLE: list[Span] = [("v1", 0, 12, 0), ("v2", 0, 8, 3), ("v3", 8, 16, 3)]
"""A prompt of ten tokens, and seven tokens, of which the last four have KV computed again."""


def spans(*given: Span) -> list[KvVersionSpan]:
    return [KvVersionSpan(version=v, start=s, end=e, first_token=f) for v, s, e, f in given]


def plain(found: list[KvVersionSpan]) -> list[Span]:
    return [(span.version, span.start, span.end, span.first_token) for span in found]


def cut(start: int, end: int) -> list[Span]:
    return plain(cut_kv_versions(spans(*WHOLE), 7, start, end))


def test_part_has_the_readings_of_its_tokens() -> None:
    assert cut(0, 7) == WHOLE
    assert cut(0, 3) == [("v1", 0, 12, 0)]
    assert cut(0, 2) == [("v1", 0, 11, 0)]
    assert cut(2, 5) == [("v1", 0, 12, 0), ("v2", 0, 8, 1), ("v3", 8, 14, 1)]
    assert cut(5, 7) == [("v2", 0, 8, 0), ("v3", 8, 16, 0)]
    assert cut(3, 3) == []
    assert cut_kv_versions([], 7, 0, 7) == []


def test_context_between_samples_moves_their_tokens() -> None:
    first, second = spans(("v1", 0, 12, 0)), spans(("v1", 0, 10, 0), ("v2", 10, 20, 0))
    joined = joined_kv_versions([(first, 3), ([], 4), (second, 2)])
    assert plain(joined) == [("v1", 0, 12, 0), ("v1", 0, 10, 7), ("v2", 10, 20, 7)]


def test_equal_kv_is_one_reading() -> None:
    first, second = spans(("v1", 0, 12, 0)), spans(("v1", 0, 12, 0), ("v2", 12, 20, 0))
    assert plain(joined_kv_versions([(first, 3), (second, 2)])) == [
        ("v1", 0, 12, 0),
        ("v2", 12, 20, 0),
    ]
