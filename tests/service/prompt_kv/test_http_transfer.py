import pytest

from service.kv.handles.downloads import ByteRange, OutOfRange, requested_range

ETAG = '"0123"'


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=90-", 90, 100),
        ("bytes=90-1000", 90, 100),
        ("bytes=-7", 93, 100),
        ("bytes=-1000", 0, 100),
    ],
)
def test_single_range_is_partial_content(header: str, start: int, end: int) -> None:
    part = ByteRange(start=start, end=end, num_bytes=100)
    assert requested_range(header, None, ETAG, 100) == part
    assert requested_range(header, ETAG, ETAG, 100) == part


@pytest.mark.parametrize(
    "header", [None, "", "bytes=-", "bytes=5-4", "bytes=0-1,3-4", "lines=1-2", "bytes=a-b"]
)
def test_other_range_headers_give_the_whole_file(header: str | None) -> None:
    assert requested_range(header, None, ETAG, 100) is None


@pytest.mark.parametrize("if_range", ['"other"', 'W/"0123"', "Fri, 20 Nov 2026 00:00:00 GMT"])
def test_if_range_of_other_bytes_gives_the_whole_file(if_range: str) -> None:
    assert requested_range("bytes=10-19", if_range, ETAG, 100) is None


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_range_past_the_end_reports_the_size(header: str) -> None:
    with pytest.raises(OutOfRange) as caught:
        requested_range(header, None, ETAG, 100)
    assert caught.value.headers == {"Content-Range": "bytes */100"}
