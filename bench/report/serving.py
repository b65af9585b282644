"""Charts of the service itself, and the summary of all charts."""

from matplotlib.figure import Figure

from bench.against_vllm_serve import EQUAL, STOCK
from bench.report.drawing import Ratio, bar_chart, ratio_chart
from bench.report.generation import SPLICED
from bench.report.records import Chart, chart, has_row, median, number, ratio, record
from bench.report.training import step
from bench.report.whole_groups import groups_ratio


def headline() -> Figure:
    rows = [
        ratio(
            "cross_context",
            f"2696 tokens: TTFT of all prompts, prefilled / {SPLICED}",
            "TTFT of agents' prompts, KV spliced (approximate)",
            "against vLLM's prefix caching, 2,696 tokens",
        ),
        ratio(
            "trainer_step",
            step("4096/64", "repeated rows"),
            "Policy update, prompt 4,096, 8 responses of 64",
            "against SDPA on rows that repeat the prompt",
        ),
        ratio(
            "shared_prefix_decode",
            "1 group of 32, prefix 16384",
            "Decode step, 32 samples of one prompt of 16,384",
            "against vLLM's own attention",
        ),
        groups_ratio("8 x 8 at 4096", STOCK, "8 groups of 8 samples over HTTP, prompts of 4,096"),
        groups_ratio("8 x 8 at 4096", EQUAL, "8 groups of 8 samples over HTTP, prompts of 4,096"),
        ratio(
            "speculation_100m_1",
            "ours over suffix",
            "Sibling drafts, 100M model, temperature 1.0",
            "against vLLM's suffix decoding, its defaults",
        ),
        ratio(
            "trees",
            "time, flat / tree, shared-prefix attention off",
            "Tree of 16 leaves that splits every 64 tokens",
            "against 16 separate samples",
        ),
        ratio(
            "trainer_step",
            step("4096/64", "PrefixGrouper"),
            "Policy update, prompt 4,096, 8 responses of 64",
            "against PrefixGrouper",
        ),
        ratio(
            "trainer_step",
            step("128/1024", "repeated rows"),
            "Policy update, prompt 128, 8 responses of 1,024",
            "against SDPA on rows that repeat the prompt",
        ),
        ratio(
            "speculation_100m_1",
            "ours over off",
            "Sibling drafts, 100M model, temperature 1.0",
            "against no speculation",
        ),
        ratio(
            "service_overhead",
            "throughput, HTTP / direct",
            "Throughput of rollouts over HTTP",
            "against direct calls of vLLM's AsyncLLM",
        ),
        ratio(
            "adapter_cost",
            "throughput, adapter in use",
            "Throughput with a LoRA adapter of rank 16 in use",
            "against no adapter",
        ),
    ]
    return ratio_chart(
        rows,
        title="CPU with 2 cores",
        xlabel="gain over the named baseline, with 95 % interval",
        ticks=(0.5, 0.7, 1, 1.5, 2, 3, 5, 10),
    )


def headline_text() -> str:
    off = median("speculation_100m_1", "ours over off")
    adapter = median("adapter_cost", "throughput, adapter in use")
    leaves = number("trees", "effective independent leaves", "tree ")
    return f"""
Each row compares one capability with the baseline that is named under it. Both were measured in
the same run. A filled dot is a clear difference. A hollow dot is no clear difference: its interval
contains 1x.
Not everything gains: sibling drafts show no clear difference from decoding without speculation
({off}), and an engine that uses a LoRA adapter has {adapter} of the throughput. The leaves of a
tree share tokens, so its 16 leaves are worth {leaves} independent samples. Spliced KV is
approximate; see [its error](#error-of-reused-kv).
"""


TRANSPORTS = (
    "shared memory, with checksums",
    "bare socket",
    "HTTP",
    "HTTP, with checksums",
    "NIXL, with checksums",
)


def bandwidth(name: str) -> float:
    return next(
        float(r["value"].split()[0]) for r in record("kv_transport")["rows"] if r["what"] == name
    )


def kv_transport() -> Figure:
    bars = [(name, bandwidth(name), f"{bandwidth(name):.2f}") for name in TRANSPORTS]
    return bar_chart(bars, xlabel="GB/s")


def kv_transport_text() -> str:
    http = median("kv_transport", "bandwidth, HTTP / bare socket")
    memory = median("kv_transport", "time, HTTP / reading")
    loaded = number("kv_transport", "four readers: p50 latency of a small rollout")
    floor = _beside_bare_sockets()
    return f"""
A process on the same machine read the prompt KV of 1,024 tokens (144 MiB) over each transport.
The baseline is a bare socket. HTTP without checksums has {http} of the bandwidth of the bare
socket. Reading and verifying every byte through shared memory is {memory} as fast as HTTP without
checksums, as the median over pairs of runs; the chart shows the median of each transport. While
four readers are active, a small rollout takes {loaded:.2f} times as long (median latency), which
misses the goal of 1.3 times.{floor}
"""


def _beside_bare_sockets() -> str:
    """Sentences about the part of the readers' effect that is due to the machine's processors."""
    row = "four bare sockets instead"
    if not has_row("kv_transport", row):
        return ""
    floor = number("kv_transport", row)
    return f"""
If the same bytes are sent at the same rate over bare sockets by another process, the rollout takes
{floor:.2f} times as long: the readers, the sender, the server and its client share two processor
cores."""


def event_loop() -> Figure:
    rows = record("loop_latency")["rows"]
    bars = [
        (r["what"].partition(", ")[2], float(r["value"].split()[0]), r["value"].split(" (")[0])
        for r in rows
    ]
    return bar_chart(bars, xlabel="99th percentile of /livez, ms", goal=100)


def event_loop_text() -> str:
    worst = max(number("loop_latency", row["what"]) for row in record("loop_latency")["rows"])
    return f"""
A service with a fake engine received and answered the largest permitted requests, one kind per
row. Meanwhile `/livez` was requested every 10 ms. There is no baseline; the goal is a 99th
percentile below 100 ms. Every row meets it, the slowest with {worst:.1f} ms.
"""


UNUSED_KV = "throughput without exports"


def unused_prompt_kv() -> list[Ratio]:
    """The cost of prompt KV that nobody requests; none in records of an earlier benchmark."""
    if not has_row("kv_export_cost", UNUSED_KV):
        return []
    return [ratio("kv_export_cost", UNUSED_KV, "Prompt KV on, no export", "against off")]


def costs() -> Figure:
    rows = [
        ratio(
            "service_overhead",
            "throughput, HTTP",
            "Rollouts over HTTP",
            "against AsyncLLM directly",
        ),
        ratio("kv_export_cost", "throughput, with", "Prompt KV exported", "against no export"),
        *unused_prompt_kv(),
        ratio(
            "adapter_cost",
            "throughput, adapter loaded",
            "LoRA adapter loaded, unused",
            "against none",
        ),
        ratio("adapter_cost", "throughput, adapter in use", "LoRA adapter in use", "against none"),
        ratio(
            "drafter_training_cost",
            "tokens/s, training / training stopped, after",
            "Drafter trains in the background, converged",
            "against training stopped",
        ),
        ratio(
            "drafter_training_cost",
            "tokens/s, training / training stopped, while",
            "Drafter trains in the background, still improving",
            "against training stopped",
        ),
    ]
    return ratio_chart(rows, xlabel="throughput with / without", ticks=(0.5, 0.7, 0.85, 1, 1.2))


def costs_text() -> str:
    adapter = median("adapter_cost", "throughput, adapter in use")
    return f"""
The throughput of an engine with a feature is compared with that of the same engine without it.
Rollouts over HTTP are compared with direct calls of vLLM's `AsyncLLM`. Only a LoRA adapter in use
has a clear cost ({adapter}). The other intervals contain 1x. Some of them are wide and do not
exclude a cost of ten per cent.
"""


CONTROLS = {
    "no control": "no control",
    "stop": "stop strings",
    "min_p": "min_p",
    "penalties": "penalties",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "regex": "structured outputs: regex",
    "json": "structured outputs: JSON schema",
}
VLLM = "throughput / that of vLLM's server"


def vllm_server() -> Figure:
    rows = [
        ratio(
            "sampling_controls", f"{name}: {VLLM}", f"Rollouts, {label}", "against /v1/completions"
        )
        for name, label in CONTROLS.items()
    ]
    bench = ratio(
        "vllm_bench_serve",
        "output throughput",
        "vllm bench serve, prefix_repetition",
        "against the same route",
    )
    return ratio_chart(
        [*rows, bench], xlabel="throughput / vLLM's server", ticks=(0.9, 1, 1.2, 1.4, 1.7)
    )


def vllm_server_text() -> str:
    bench = median("vllm_bench_serve", "output throughput")
    slow = next(r for r in record("vllm_bench_serve")["rows"] if r["what"] == "p99_itl_ms")
    ours, theirs = (part.split()[1] for part in slow["value"].split(", "))
    return f"""
vLLM's OpenAI server ran beside this one, with the same model, data type, batch and KV cache, and
both were measured in turn. Rollouts were 4 groups of 8 samples with prompts of 128 and responses of
64 tokens; vLLM's server got one request per group, with `n: 8`. With every sampling control the
throughput is above vLLM's. `vllm bench serve` sends streams of single samples to the OpenAI routes
of both: {bench} of the throughput. There the slowest per cent of the times between tokens is
longer: {ours} ms against {theirs} ms.
"""


HEADLINE = Chart(
    name="results",
    title="Summary",
    records=(
        "against_vllm_serve",
        "cross_context",
        "trainer_step",
        "shared_prefix_decode",
        "speculation_100m_1",
        "trees",
        "service_overhead",
        "adapter_cost",
    ),
    draw=headline,
    text=headline_text,
)
CHARTS = (
    chart(
        vllm_server,
        vllm_server_text,
        "Against vLLM's server",
        "sampling_controls",
        "vllm_bench_serve",
    ),
    chart(kv_transport, kv_transport_text, "Transport of prompt KV", "kv_transport"),
    chart(event_loop, event_loop_text, "Responsiveness under large requests", "loop_latency"),
    chart(
        costs,
        costs_text,
        "Cost of other features",
        "service_overhead",
        "kv_export_cost",
        "adapter_cost",
        "drafter_training_cost",
    ),
)
