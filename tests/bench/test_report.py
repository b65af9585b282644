"""The page of benchmarks is what the records say."""

from bench.harness.report import PAGE, page


def test_the_page_is_written_from_the_records() -> None:
    assert PAGE.read_text() == page()
