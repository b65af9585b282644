"""The benchmark page matches the records."""

from bench.harness.benchmarks_page import PAGE, page


def test_page_is_generated_from_the_records() -> None:
    assert PAGE.read_text() == page()
