"""Questions that a run answers, each with its criterion."""

import re
import statistics
from collections.abc import Callable, Sequence
from math import fsum
from typing import Any, Final

from bench.gpu.results import Decision, Results, at, interval, quotient, sum_of
from bench.gpu.workloads import ATTENTION, HOST_ROWS, PAIRS, TAIL, TAIL_ROWS


def sharing_kernel(results: Results) -> Decision:
    limits = {"16x16@1024": 0.6, "16x16@4096": 0.25}
    return results.decide(
        "Is sharing worth it in the kernel?",
        "shared / stock in graphs with flushed L2 <= 0.6 at 16x16@1024 and <= 0.25 at 4096",
        [
            at(
                batch,
                quotient(results.kernel_us("shared", batch), results.kernel_us("stock", batch)),
                lambda value, limit=limit: value <= limit,  # type: ignore[misc]
            )
            for batch, limit in limits.items()
        ],
    )


def sharing_end_to_end(results: Results) -> Decision:
    limits = {"16x16@1024": 1.15, "16x16@4096": 2.5}
    return results.decide(
        "Is sharing worth it end to end?",
        "tokens/s, always / off >= 1.15 at 16x16@1024 and >= 2.5 at 4096",
        [
            interval(batch, results.speedup("always", "off", batch), lambda v, x=limit: v >= x)  # type: ignore[misc]
            for batch, limit in limits.items()
        ],
    )


def sharing_choice(results: Results) -> Decision:
    def figure(batch: str) -> tuple[str, bool | None]:
        ratios = [results.speedup("auto", other, batch) for other in ("off", "always")]
        known = [ratio for ratio in ratios if ratio is not None]
        worst = min(known, key=lambda ratio: ratio.median) if len(known) == len(ratios) else None
        return interval(batch, worst, lambda value: value >= 0.97)

    return results.decide(
        "Does auto choose well?",
        "tokens/s, auto / the better of off and always >= 0.97 at all shapes",
        [figure(batch) for batch in ATTENTION],
    )


def full_graphs(results: Results) -> Decision:
    def milliseconds(mode: str) -> float | None:
        sums = sum_of(run["timers"] for run in results.batches(mode, "16x16@1024"))
        worker = sums.get("Worker.execute_model")
        return 1000 * worker["cpu_seconds"] / worker["calls"] if worker else None

    always, off = milliseconds("always"), milliseconds("off")
    more = always - off if always is not None and off is not None else None
    return results.decide(
        "Are full graphs for sharing worth the work?",
        "processor time of execute_model, always - off > 2.5 ms per step at 16x16@1024",
        [at("ms", more, lambda value: value > 2.5)],
    )


def block_size(results: Results) -> Decision:
    def figure(heads: list[int]) -> tuple[str, bool | None]:
        variants: list[dict[str, Any]] = [{"block_size": 64}, {"block_size": 128}]
        variants += [{"layout": "HND"}] if heads == [16, 8] else []
        stock = results.kernel_us("stock", "256x1@1024", heads=heads)
        others = [
            (quotient(stock, results.kernel_us("stock", "256x1@1024", heads=heads, **each)), each)
            for each in variants
        ]
        known = [(value, each) for value, each in others if value is not None]
        best, which = max(known, key=lambda pair: pair[0]) if known else (None, {})
        name = " ".join(f"{key} {value}" for key, value in which.items())
        return at(f"GQA {heads[0] // heads[1]}, {name}", best, lambda value: value >= 1.1)

    figures = [figure(heads) for heads in ([16, 8], [32, 8])]
    # One of the two is enough.
    is_any = any(met for _, met in figures)
    return results.decide(
        "Is another block size or layout faster?",
        "stock time of 256 independent rows at 1024, with blocks of 16 / with another one >= 1.1",
        [(text, is_any or met) if met is not None else (text, met) for text, met in figures],
    )


def host_ceiling(results: Results) -> Decision:
    steps = {rows: results.step_seconds("host", f"host {rows}") for rows in HOST_ROWS}
    points = [(rows, seconds) for rows, seconds in steps.items() if seconds is not None]
    a, b = None, None
    if len(points) == len(HOST_ROWS):
        b, a = statistics.linear_regression(*zip(*points, strict=True))
    return results.decide(
        "Is the host the limit, as modeled?",
        "step = a + b x rows with b of 25 to 45 us and a of 1.5 to 4.5 ms",
        [
            at("a, ms", None if a is None else 1000 * a, lambda value: 1.5 <= value <= 4.5),
            at("b, us", None if b is None else 1e6 * b, lambda value: 25 <= value <= 45),
        ],
    )


def pause_today(results: Results) -> Decision:
    files = [line["pause"] for line in results.lines("pause.jsonl") if line["kind"] == "files"]
    transfers = [line["pause"] for line in results.lines("pause.jsonl") if line["kind"] == "ipc"]
    later = statistics.median(files[1:]) if files[1:] else None
    return results.decide(
        "Is the pause of a publication too long?",
        "a later load of 8B parameters from files > 0.5 s",
        [
            at("first load, s", files[0] if files else None, lambda value: True),
            at("later load, s", later, lambda value: value > 0.5),
            at("CUDA IPC, s", transfers[-1] if transfers else None, lambda value: True),
        ],
    )


def pinned_arena(results: Results) -> Decision:
    copies = results.json("copies.json")
    pinned, registered = (
        copies.get(f"{kind}, pieces of 64 MiB, GB/s")
        for kind in ("pinned memory", "registered file")
    )
    within = copies.get("within the GPU, foreach, GB/s")
    milliseconds = quotient(copies.get("bytes"), within and within * 1e6)
    return results.decide(
        "Does a pinned arena pay?",
        "H2D >= 40 GB/s, registered memory >= 0.9 of pinned, a pass within the GPU <= 15 ms",
        [
            at("H2D, GB/s", pinned, lambda value: value >= 40),
            at("registered / pinned", quotient(registered, pinned), lambda value: value >= 0.9),
            at("pass within the GPU, ms", milliseconds, lambda value: value <= 15),
        ],
    )


def drafting(results: Results) -> Decision:
    cost = [
        at(
            f"cost at batch {rows}",
            quotient(
                results.step_seconds("drafter", f"tail {rows}"),
                results.step_seconds("off", f"tail {rows}"),
            ),
            lambda value, rows=rows: rows > 4 or value <= 1.25,  # type: ignore[misc]
        )
        for rows in TAIL_ROWS
    ]
    bounds = [
        interval(f"{mode}, {batch}", results.speedup(mode, "off", batch), lambda value: value >= 2)
        for mode, batches in (("siblings", PAIRS), ("drafter", TAIL))
        for batch in batches
    ]
    return results.decide(
        "Does drafting pay in the tail?",
        "step with 4 drafts / without <= 1.25 at batch <= 4; tokens/s, all drafts accepted >= 2 x",
        [*cost, *bounds],
    )


def graph_bytes(results: Results) -> Decision:
    lines = results.json("facts.json").get("arm-off", [])
    taken = [float(found[1]) for line in lines if (found := re.search(r"took ([\d.]+) GiB", line))]
    graphs = {found[1] for line in lines if (found := re.search(r"(Capturing.*?\d+/\d+)", line))}
    counts = [int(each.rpartition("/")[2]) for each in graphs if re.search(r"(\d+)/\1$", each)]
    captured = [line for line in lines if "Graph capturing" in line]
    megabytes = taken[-1] * 2**30 / 1e6 / fsum(counts) if captured and taken and counts else None
    return results.decide(
        "Can twelve more graphs be afforded?",
        "MB per captured graph <= 13",
        [at("MB per graph", megabytes, lambda value: value <= 13)],
    )


QUESTIONS: Final[Sequence[Callable[[Results], Decision]]] = (
    sharing_kernel,
    sharing_end_to_end,
    sharing_choice,
    full_graphs,
    block_size,
    host_ceiling,
    pause_today,
    pinned_arena,
    drafting,
    graph_bytes,
)
