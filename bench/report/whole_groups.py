"""Chart of whole groups of samples, against `vllm serve`."""

from matplotlib.figure import Figure

from bench.against_vllm_serve import CASES, EQUAL, STOCK, UNSHARED
from bench.report.drawing import Ratio, ratio_chart
from bench.report.records import Chart, chart, median, ratio

RECORD = "against_vllm_serve"
NATIVE, OPENAI = "tokens/s, rollouts", "tokens/s, our OpenAI route"
BASELINES = {
    STOCK: "against vllm serve as it starts by default",
    EQUAL: "against vllm serve with one thread per processor",
}


def groups_ratio(case: str, server: str, label: str) -> Ratio:
    return ratio(RECORD, f"{case}: {NATIVE} / {server}", label, BASELINES[server])


def whole_groups() -> Figure:
    rows = [
        groups_ratio(case, server, f"Rollouts, {case}") for case in CASES for server in BASELINES
    ]
    return ratio_chart(rows, xlabel="tokens/s / vllm serve", ticks=(0.7, 1, 1.4, 2, 3))


def whole_groups_text() -> str:
    shared = [case for case in CASES if case != UNSHARED]
    stock, equal = (
        ", ".join(f"{median(RECORD, f'{case}: {NATIVE} / {server}')} for {case}" for case in shared)
        for server in BASELINES
    )
    unshared, unshared_equal, openai, openai_equal = (
        median(RECORD, f"{UNSHARED}: {route} / {server}")
        for route in (NATIVE, OPENAI)
        for server in BASELINES
    )
    threads = median(RECORD, f"{UNSHARED}: tokens/s, {EQUAL} / {STOCK}")
    return f"""
Groups were requested from this server and from `vllm serve`, in turn: 8 x 8 at 512 is 8 groups of 8
samples of a prompt of 512 tokens each. Responses have 64 tokens and their logprobs. Both servers
have the same wheel, model, data type and KV cache. Throughput of rollouts relative to `vllm serve`
as it starts by default: {stock}. Much of this gain is threads: by default vLLM leaves one of the
two processors to its scheduler, and with one thread per processor, as in this server, it has
{threads} of the throughput for {UNSHARED}, where no prompt is shared. Relative to `vllm serve` with
as many threads as this server, rollouts have {equal}. Most of the time is prefill and linear
layers, which are the same in both servers. Without shared prompts rollouts have {unshared} and
{unshared_equal} of the throughput of the two, and this server's OpenAI route {openai} and
{openai_equal}.
"""


CHARTS: tuple[Chart, ...] = (
    chart(whole_groups, whole_groups_text, "Whole groups against `vllm serve`", RECORD),
)
