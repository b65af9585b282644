"""Chart of agent sessions: tool pauses, tokens of the trainer, and throughput."""

from matplotlib.figure import Figure

from bench.report.drawing import Ratio, ratio_chart
from bench.report.records import chart, has_row, median, number, ratio

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
        rows, xlabel="gain over the named baseline", ticks=(0.7, 1, 1.5, 2, 3, 5, 10)
    )


def _retention() -> list[Ratio]:
    """Retained KV while other callers fill the cache; none in records of an earlier benchmark."""
    if not has_row("sessions", RETAINED):
        return []
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
    if not has_row("sessions", RETAINED):
        return ""
    gain, others = median("sessions", RETAINED), median("sessions", OTHERS)
    return (
        f"A server that retains the KV of paused sessions returned the first token {gain} as fast "
        f"under the same load, and the other callers had {others} of the throughput."
    )


CHARTS = (chart(agent_sessions, agent_sessions_text, "Agent sessions", "sessions"),)
