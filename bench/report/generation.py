"""Charts of generation: attention over shared prefixes, speculation and reuse of KV."""

import re

import matplotlib
from matplotlib.figure import Figure

from bench.report import drawing
from bench.report.drawing import bar_chart, parse_ratio, ratio_chart
from bench.report.records import cell, chart, has_row, median, number, ratio, record


def decode() -> Figure:
    rows = [
        ratio("shared_prefix_decode", what, *_layout(what), ceiling="without attention")
        for what in (row["what"] for row in record("shared_prefix_decode")["rows"])
        if "without attention" in cell("shared_prefix_decode", what)
    ]
    return ratio_chart(
        rows,
        xlabel="time of vLLM's attention / time of ours, whole decode step",
        ticks=(0.8, 1, 1.5, 2, 3, 5, 10),
    )


def _layout(what: str) -> tuple[str, str]:
    """A label and a second line for a row such as `1 group of 32, prefix 4096`."""
    counts, _, prefix = what.partition(", prefix ")
    if not prefix:
        return "256 prompts that share nothing", "128 tokens each"
    tokens, _, rest = re.sub(r"(\d)(\d{3})\b", r"\1,\2", prefix).partition(" ")
    return f"{counts} samples, prefix of {tokens.rstrip(',')} tokens", rest


def decode_text() -> str:
    longest = "1 group of 32, prefix 16384"
    gain = median("shared_prefix_decode", longest)
    limit = number("shared_prefix_decode", longest, "without attention")
    alone = median("shared_prefix_decode", "256 different prompts")
    return f"""
Whole engine steps of a 25M-parameter model in bfloat16 were timed with shared-prefix attention.
The baseline is vLLM's own attention over the same KV cache. The small vertical line in each row
is the gain if attention took no time. The gain rises with the length of the prefix, to {gain} at
16,384 tokens, where {limit:.2f}x is the limit. Prompts that share nothing neither gain nor lose
({alone}).
"""


WORKLOADS = {
    "speculation_25m_1": "25M, temperature 1.0",
    "speculation_25m_0_6": "25M, temperature 0.6",
    "speculation_100m_1": "100M, temperature 1.0",
    "speculation_100m_0_6": "100M, temperature 0.6",
}


BASELINES = {
    "off": "no speculation",
    "ngram": "vLLM's n-gram drafts, 4 tokens",
    "suffix": "vLLM's suffix decoding, its defaults",
    "fixed-1": "our drafts at a fixed length of 1",
    "fixed-2": "our drafts at a fixed length of 2",
}


def speculation() -> Figure:
    rows = [
        ratio(name, f"ours over {arm},", f"against {baseline}", label)
        for arm, baseline in BASELINES.items()
        for name, label in WORKLOADS.items()
        if has_row(name, f"ours over {arm},")
    ]
    return ratio_chart(
        rows,
        xlabel="tokens/s with sibling drafts / tokens/s of the baseline",
        ticks=(0.6, 0.8, 1, 1.5, 2),
    )


def extremes(arm: str) -> tuple[float, float]:
    """The lowest and the highest ratio to a baseline among the workloads."""
    ratios = [parse_ratio(cell(name, f"ours over {arm}"))[0] for name in WORKLOADS]
    return min(ratios), max(ratios)


def speculation_text() -> str:
    suffix, off = extremes("suffix"), extremes("off")
    return f"""
Eight groups of eight samples were generated with sibling drafts of adaptive length and with each
baseline. All generate the same tokens. Sibling drafts are {suffix[0]:.2f} to {suffix[1]:.2f}
times as fast as Arctic's suffix decoding in vLLM. On this machine, however, speculation gains
nothing: the ratio to no speculation is {off[0]:.2f}x to {off[1]:.2f}x.
"""


DRAFTERS = {
    "ours": "sibling drafts",
    "Arctic, 4x match length": "Arctic suffix decoding, drafts up to 4x the match",
    "Arctic, vLLM defaults": "Arctic suffix decoding, vLLM's defaults",
    "n-gram 2..4": "n-gram of 2 to 4 tokens",
}


SIBLINGS = (0, 1, 3, 7, 15)


def accepted(temperature: str, siblings: int, drafter: str) -> float:
    return number(
        "drafter_replay", f"T {temperature}, {siblings} finished siblings: accepted", f"{drafter} "
    )


def draft_length() -> Figure:
    with matplotlib.rc_context(drawing.STYLE):
        figure = Figure(figsize=(drawing.WIDTH, 3.4), layout="constrained")
        for axes, temperature in zip(
            figure.subplots(1, 2, sharey=True), ("1.0", "0.6"), strict=True
        ):
            series = {
                label: [accepted(temperature, n, drafter) for n in SIBLINGS]
                for drafter, label in DRAFTERS.items()
            }
            xlabel = f"finished siblings, temperature {temperature}"
            drawing.line_chart(axes, range(5), series, xlabel=xlabel, ylim=(1, 6.5))
            axes.set_xticks(range(5), [str(n) for n in SIBLINGS])
        figure.axes[0].set_ylabel("tokens per forward pass")
        figure.axes[1].get_legend().remove()  # type: ignore[union-attr]
    return figure


def draft_length_text() -> str:
    drafters = ("ours", "Arctic, 4x match length")
    ours, arctic = (accepted("1.0", 15, name) for name in drafters)
    ours_alone, arctic_alone = (accepted("1.0", 0, name) for name in drafters)
    return f"""
Recorded rollouts of the bundled model were replayed, and the mean number of tokens per forward
pass was counted. The baselines are Arctic's suffix decoding, at vLLM's defaults and with longer
drafts, and n-grams. A finished sibling is a finished sample of the same group. With 15 of them at
temperature 1.0, sibling drafts reach {ours:.2f} tokens and Arctic's better setting {arctic:.2f}.
With none, Arctic's setting is slightly better ({arctic_alone:.2f} against {ours_alone:.2f}).
Nothing is timed here: a forward pass with drafts is slower than one without.
"""


SPLICED = "spliced (4 recomputed per span)"


ARMS = {
    SPLICED: "KV spliced, 4 tokens recomputed per span",
    "spliced (0 recomputed per span)": "KV spliced, nothing recomputed",
    "spliced (64 recomputed per span)": "KV spliced, 64 tokens recomputed per span",
    "predicted": "KV predicted from earlier rounds",
}


def ttft(tokens: int, arm: str) -> str:
    return f"{tokens} tokens: TTFT of all prompts, prefilled / {arm}"


def kv_reuse() -> Figure:
    rows = [ratio("cross_context", ttft(2696, SPLICED), ARMS[SPLICED], "prompts of 2,696 tokens")]
    rows += [
        ratio("cross_context", ttft(1128, arm), label, "prompts of 1,128 tokens")
        for arm, label in ARMS.items()
    ]
    return ratio_chart(
        rows,
        xlabel="TTFT with prefix caching / TTFT of the method",
        ticks=(0.5, 0.7, 1, 1.5, 2, 3, 5, 10),
    )


def kv_reuse_text() -> str:
    spliced = [median("cross_context", ttft(tokens, SPLICED)) for tokens in (1128, 2696)]
    return f"""
Five agents sent each other messages, and the time to first token (TTFT) of their prompts was
measured. The baseline is vLLM's prefix caching, which reuses only KV of a common beginning.
Spliced KV has a gain of {spliced[0]} for prompts of 1,128 tokens and {spliced[1]} for prompts of
2,696. Predicted KV is not clearly faster.
"""


DIVERGENCES = {
    "252 tokens of arithmetic: KL divergence": "bundled model, 252 tokens",
    "490 tokens of arithmetic: KL divergence": "bundled model, 490 tokens",
    "994 tokens of arithmetic: KL divergence": "bundled model, 994 tokens",
    "agents: 239 tokens: KL divergence": "trained on agents' messages, 239 tokens",
    "agents: 508 tokens: KL divergence": "trained on agents' messages, 508 tokens",
    "agents: 993 tokens: KL divergence": "trained on agents' messages, 993 tokens",
}


def divergence(what: str) -> float:
    return number("cross_context", f"{what}, {SPLICED}")


def splice_error() -> Figure:
    bars = [
        (label, divergence(what), f"{divergence(what):.4f}") for what, label in DIVERGENCES.items()
    ]
    return bar_chart(bars, xlabel="KL divergence, nats per token", goal=0.05)


def splice_error_text() -> str:
    row = f"agents: 239 tokens: probability of the right answer, {SPLICED}"
    points = re.findall(r"-?[\d.]+", cell("cross_context", row))[1].lstrip("-")
    worst = divergence("994 tokens of arithmetic: KL divergence")
    return f"""
Spliced KV is approximate. Here 4 tokens are recomputed per span. The error is the KL divergence
between the next-token distributions after a prefilled and after a spliced prompt. The goal is less
than 0.05 nats per token. A model that was trained on agents' messages meets it, but loses {points}
percentage points of probability on the right answer with prompts of 239 tokens. The bundled model
misses the goal from 490 tokens on, and reaches {worst:.2f} at 994.
"""


CHARTS = (
    chart(decode, decode_text, "Decoding after a shared prefix", "shared_prefix_decode"),
    chart(speculation, speculation_text, "Speculation", *WORKLOADS),
    chart(draft_length, draft_length_text, "Tokens per forward pass", "drafter_replay"),
    chart(kv_reuse, kv_reuse_text, "Time to first token with reused KV", "cross_context"),
    chart(splice_error, splice_error_text, "Error of reused KV", "cross_context"),
)
