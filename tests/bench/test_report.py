"""The pages and charts of docs/performance match the records."""

import re

import pytest

from bench.harness.record import RECORDS
from bench.report import agents, generation, performance_page
from bench.report.benchmarks_page import PAGE, page
from bench.report.drawing import Ratio, parse_ratio, ratio_chart, svg
from bench.report.records import cell, record
from bench.report.serving import HEADLINE


def test_page_is_generated_from_the_records() -> None:
    assert PAGE.read_text() == page()


def test_charts_and_their_page_are_generated_from_the_records() -> None:
    stale = [
        path.name
        for path, text in performance_page.files().items()
        if not path.exists() or path.read_text() != text
    ]
    assert not stale, "python -m bench.report.performance_page"


def test_every_machine_of_the_charts_is_listed_on_their_page() -> None:
    assert performance_page.sentence(["a", "a"]) == "The machine has a."
    assert performance_page.sentence(["a", "b", "b"]).endswith("\n  b; or a.")


def test_folder_has_no_chart_that_is_not_generated() -> None:
    drawn = {path.name for path in performance_page.files() if path.suffix == ".svg"}
    assert {path.name for path in performance_page.FOLDER.glob("*.svg")} == drawn


def test_ratios_of_the_reference_page_are_those_of_the_record() -> None:
    page = (RECORDS.parents[1] / "docs" / "reference" / "sampling-support.md").read_text()
    values = {row["what"]: row["value"] for row in record("support_replay")["rows"]}
    shape = (
        r"(\S+) \((\S+)% out of band\) -> (\S+) \((\S+)% out of band\), (\S+) kB per 1,000 tokens"
    )
    found = {what: re.fullmatch(shape, value) for what, value in values.items()}
    rows = {
        what.removesuffix(", no drafts"): m for what, m in found.items() if m and "no d" in what
    }
    assert len(rows) > 10
    for what, plain in rows.items():
        drafted = found[f"{what}, sibling drafts"]
        assert drafted is not None
        assert (
            f"| {what} | {plain[1]}, {plain[2]} % out of band | {plain[3]}, {plain[4]} % "
            f"| {drafted[3]}, {drafted[4]} % | {plain[5]} |"
        ) in page


def test_divergences_of_kept_kv_on_the_concept_page_are_those_of_the_record() -> None:
    page = (RECORDS.parents[1] / "docs" / "concepts" / "weights-version.md").read_text()
    for limit in agents.LIMITS:
        share, kl = agents.prefilled(limit), agents.kl(limit)
        name = "no limit" if limit == "keep all" else f"`{limit.replace(' ', ': ')}`"
        ratio = agents.expected_ratio(limit)
        assert f"| {name} | {share:.0f} % | {kl:.1e} | {ratio:.4f} |" in page


def test_chart_depends_on_the_data_and_on_nothing_else() -> None:
    def drawn(median: float) -> str:
        row = Ratio(label="a", median=median, low=1.1, high=2.5)
        return svg(ratio_chart([row], xlabel="gain", ticks=(0.5, 1, 3)))

    assert drawn(2.0) == drawn(2.0) != drawn(1.5)


@pytest.mark.parametrize(
    ("low", "high", "is_clear"), [(1.1, 2, True), (0.5, 0.9, True), (0.9, 1.1, False)]
)
def test_interval_that_contains_one_is_no_clear_difference(
    low: float, high: float, is_clear: bool
) -> None:
    assert Ratio(label="", median=(low + high) / 2, low=low, high=high).is_clear is is_clear


def test_summary_has_a_gain_a_loss_and_no_clear_difference() -> None:
    """Losses must not disappear from the chart that most readers see."""
    kinds = {
        "adapter_cost": "throughput, adapter in use",
        "speculation_100m_1": "ours over off",
        "shared_prefix_decode": "1 group of 32, prefix 16384",
    }
    assert set(kinds) <= set(HEADLINE.records)
    ranges = {name: parse_ratio(cell(name, what))[1:] for name, what in kinds.items()}
    assert ranges["adapter_cost"][1] < 1 < ranges["shared_prefix_decode"][0]
    assert ranges["speculation_100m_1"][0] < 1 < ranges["speculation_100m_1"][1]


def test_conclusions_of_the_texts_hold() -> None:
    """Statements of the texts that are words, not numbers read from a record."""

    def interval(name: str, what: str) -> tuple[float, float]:
        return parse_ratio(cell(name, what))[1:]

    assert all(interval(name, "ours over suffix")[0] > 1 for name in generation.WORKLOADS)
    off = [interval(name, "ours over off") for name in generation.WORKLOADS]
    assert all(low < 1 < high for low, high in off)
    low, high = interval("cross_context", generation.ttft(1128, "predicted"))
    assert low < 1 < high
    assert interval("trainer_step", "128/1024, G=8, bfloat16, vocabulary 32768: repeated")[0] < 1
    for name, what in (
        ("service_overhead", "throughput, HTTP"),
        ("kv_export_cost", "throughput, with"),
        ("adapter_cost", "throughput, adapter loaded"),
        ("drafter_training_cost", "tokens/s, training / training stopped, after"),
        ("drafter_training_cost", "tokens/s, training / training stopped, while"),
    ):
        low, high = interval(name, what)
        assert low < 1 < high, name
    assert all(row["verdict"] == "met" for row in record("loop_latency")["rows"])
    spliced = [generation.divergence(what) for what in generation.DIVERGENCES]
    assert [value < 0.05 for value in spliced] == [True, False, False, True, True, True]


def test_every_record_is_from_a_cpu() -> None:
    """The pages state that everything was measured on a CPU."""
    versions = [record(path.stem)["versions"] for path in RECORDS.glob("*.json")]
    assert all("+cpu" in found["torch"] and found["vllm"] is None for found in versions)
