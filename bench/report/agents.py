"""Charts of agent sessions, and of the KV that conversations keep across weights updates."""

from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report import drawing
from bench.report.drawing import Ratio, ratio_chart
from bench.report.records import chart, median, number, ratio, record

SCRIPTS = {
    "linear": "8 turns",
    "branches": "the agent goes back twice",
    "compaction": "the agent shortens its history",
    "sub-agents": "several conversations",
}
KEPT = "TTFT after a tool pause, KV evicted / kept"
RETAINED = "TTFT after a tool pause, KV evicted / retained"
OTHERS = "throughput of other callers"
ROUTE = "throughput, sessions / chat route"


def agent_sessions() -> Figure:
    rows = [
        ratio("sessions", KEPT, "TTFT after a tool pause, KV kept", "against KV evicted"),
        *_retention(),
        *map(_forwarded, SCRIPTS),
        ratio("sessions", ROUTE, "Throughput of agents over sessions", "against the chat route"),
    ]
    return ratio_chart(
        rows, xlabel="gain over the named baseline", ticks=(0.7, 1, 1.5, 2, 3, 5, 10, 15)
    )


def _retention() -> list[Ratio]:
    """Retained KV while other callers fill the cache."""
    pause = "TTFT after a tool pause, KV retained under load"
    return [
        ratio("sessions", RETAINED, pause, "against no retention"),
        ratio("sessions", OTHERS, "Throughput of the other callers", "against no retention"),
    ]


def _forwarded(script: str) -> Ratio:
    count = number("sessions", f"{script}: tokens forwarded, one row per turn / tree")
    label, baseline = (
        f"Tokens of the trainer, {script}",
        f"{SCRIPTS[script]}; against one row per turn",
    )
    return Ratio(label=label, baseline=baseline, median=count, low=count, high=count)


def agent_sessions_text() -> str:
    kept, route = median("sessions", KEPT), median("sessions", ROUTE)
    return f"""
An agent with a conversation of about 2,100 tokens paused for a tool. If other callers filled the KV
cache during the pause, the next turn prefilled the whole conversation; if they did not, its first
token came {kept} as fast. {_retention_text()} The counts of tokens have no interval: a session's
tree has each token of a scripted conversation once, and the baseline, one row per turn, repeats all
tokens before the turn. Agents that use sessions have {route} of the throughput of the same agents
on the chat route.
"""


def _retention_text() -> str:
    gain, others = median("sessions", RETAINED), median("sessions", OTHERS)
    return (
        f"A server that retains the KV of paused sessions returned the first token {gain} as fast "
        f"under the same load, and the other callers had {others} of the throughput."
    )


LIMITS = ("max_lag 1", "max_lag 2", "max_lag 4", "keep all")


def results(limit: str) -> dict[str, Any]:
    found: dict[str, Any] = record("kv_across_updates")["raw"][limit]
    return found


def prefilled(limit: str) -> float:
    """Per cent of the prompt tokens that were prefilled."""
    found = results(limit)
    return float(100 * found["num_prefilled_tokens"] / found["num_prompt_tokens"])


def kv_across_updates() -> Figure:
    with matplotlib.rc_context(drawing.STYLE):
        figure = Figure(figsize=(drawing.WIDTH, 3.4), layout="constrained")
        frontier, by_update = figure.subplots(1, 2, sharey=True)
        _draw_frontier(frontier)
        num_updates = len(results("keep all")["kl_by_update"])
        drawing.line_chart(
            by_update,
            range(1, num_updates + 1),
            {limit: results(limit)["kl_by_update"] for limit in LIMITS},
            xlabel="weights updates",
        )
        by_update.set_xticks(range(0, num_updates + 1, 5))
    return figure


def _draw_frontier(axes: Axes) -> None:
    """Mean divergence and cost of each limit, with two standard errors of the divergence."""
    limits = ("recompute all", *LIMITS)
    shares, means = [prefilled(limit) for limit in limits], [kl(limit) for limit in limits]
    errors = [2 * results(limit)["kl"]["error"] for limit in limits]
    axes.errorbar(shares, means, errors, color=drawing.GAIN, marker="o", markersize=5, capsize=2)
    for limit, share, mean in zip(limits, shares, means, strict=True):
        axes.annotate(limit, (share, mean), xytext=(6, 5), textcoords="offset points", fontsize=8)
    axes.set(xlabel="prompt tokens prefilled, per cent", ylabel="KL divergence, nats per token")
    axes.set_xlim(0, 135)
    axes.set_xticks(range(0, 101, 20))
    axes.set_yscale("symlog", linthresh=1e-5)
    axes.set_ylim(0, 0.2)
    axes.grid(axis="y")


def kl(limit: str) -> float:
    return float(results(limit)["kl"]["mean"])


def expected_ratio(limit: str) -> float:
    """Probability with which a token was sampled, over that of teacher forcing; expected value."""
    return float(results(limit)["expected_ratio_exact"]["mean"])


def difference(limit: str) -> float:
    """Largest difference of a returned logprob from that over the KV that was stated."""
    return float(results(limit)["max_difference_stated"])


def kv_across_updates_text() -> str:
    num_updates = len(results("keep all")["kl_by_update"])
    largest = max(map(difference, LIMITS))
    return f"""
Conversations of the bundled model were continued by one turn after each of {num_updates} weights
updates of the GRPO example (learning rate 1e-4, float32). The baseline prefills every context
again. Conversations that keep all KV prefill {prefilled("keep all"):.0f} % of their prompt tokens,
at a KL divergence of {kl("keep all"):.1e} nats per token from exact KV. With `max_lag: 1` it is
{prefilled("max_lag 1"):.0f} %, at {kl("max_lag 1"):.1e}.
Teacher forcing with the served weights alone does not give the returned log-probabilities: the
expected ratio of both probabilities is
{expected_ratio("keep all"):.4f} if all KV is kept, instead of 1. Teacher forcing over the KV that
`kv_versions` states differs from them by at most {largest:.0e}, with every limit and without one.
"""


CHARTS = (
    chart(agent_sessions, agent_sessions_text, "Agent sessions", "sessions"),
    chart(
        kv_across_updates, kv_across_updates_text, "KV across weights updates", "kv_across_updates"
    ),
)
