"""Charts of what a trainer gains: policy updates, groups that finish early, weights deltas."""

import re
import statistics

from matplotlib.figure import Figure

from bench.report.drawing import bar_chart, grouped_bars, ratio_chart
from bench.report.records import cell, chart, median, number, ratio, record

SHAPES = {
    "4096/64": "prompt 4,096, responses 64",
    "1000/100": "prompt 1,000, responses 100",
    "512/512": "prompt 512, responses 512",
    "128/1024": "prompt 128, responses 1,024",
}


def step(shape: str, baseline: str) -> str:
    """Start of the row of a policy update in bfloat16 with a vocabulary of 32,768."""
    return f"{shape}, G=8, bfloat16, vocabulary 32768: {baseline}"


def policy_update() -> Figure:
    against = {"repeated rows": "SDPA, repeated prompt", "PrefixGrouper": "PrefixGrouper"}
    rows = [
        ratio("trainer_step", step(shape, baseline), label, f"against {name}")
        for baseline, name in against.items()
        for shape, label in SHAPES.items()
    ]
    return ratio_chart(
        rows, xlabel="time of the baseline / time of coppice.train", ticks=(0.8, 1, 1.5, 2, 3, 5, 8)
    )


def policy_update_text() -> str:
    longest = median("trainer_step", step("4096/64", "repeated rows"))
    shortest = median("trainer_step", step("128/1024", "repeated rows"))
    return f"""
One optimiser step of a 25M-parameter Qwen3 (bfloat16, vocabulary 32,768) was timed on one group
of 8 responses. The baselines are PyTorch's SDPA on rows that each repeat the prompt, at the
fastest micro-batch size, and PrefixGrouper. The gain grows with the share of the prompt. Over
repeated rows it is {longest} with a prompt of 4,096 tokens and responses of 64. With a prompt of
128 and responses of 1,024 there is no clear gain ({shortest}).
"""


MEMORY = "G=8, bfloat16, vocabulary 512: peak memory"


SCHEDULES = {
    "kept": "coppice.train, schedule kept",
    "recomputed": "coppice.train, schedule recomputed",
    "one repeated row": "SDPA, one row at a time",
    "PrefixGrouper": "PrefixGrouper",
}


def memory() -> Figure:
    series = {
        label: [number("trainer_step", f"{shape}, {MEMORY}", arm) for shape in SHAPES]
        for arm, label in SCHEDULES.items()
    }
    names = [label.replace(", ", ",\n") for label in SHAPES.values()]
    return grouped_bars(names, series, ylabel="MiB beyond weights and gradients")


def memory_text() -> str:
    values = [number("trainer_step", f"128/1024, {MEMORY}", arm) for arm in SCHEDULES]
    return f"""
The peak memory of one optimiser step was measured (25M parameters, bfloat16, vocabulary 512, 8
responses). The baselines are PrefixGrouper, and SDPA on one response at a time, its setting with
the least memory. The [schedule](../concepts/training.md#schedules) `recomputed` computes the prompt
twice. With a prompt of 128 and responses of 1,024 tokens it needs {values[1]:,.0f} MiB and
PrefixGrouper {values[3]:,.0f} MiB; SDPA needs {values[2]:,.0f} MiB. With a prompt of 1,000 and
responses of 100 tokens, SDPA needs the least.
"""


POLICIES = ("first", "random", "balanced_length")


def length_bias() -> Figure:
    rows = [f"{policy}, {k} of 8" for k in (4, 6) for policy in POLICIES]
    series = {
        "finished samples are shorter by, %": [-number("length_bias", row) for row in rows],
        "the group finishes after, % of the longest sample": [
            number("length_bias", row, "finished after ") for row in rows
        ],
    }
    names = [row.replace(", ", ",\n") for row in rows]
    return grouped_bars(names, series, ylabel="per cent")


def length_bias_text() -> str:
    share = number("length_bias", "first, 4", "finished after ")
    bias = -number("length_bias", "first, 4")
    return f"""
A finish policy selects 4 or 6 of the 8 samples of a group. Two things were measured over 256
problems: how much shorter the selected samples are than the mean of all 8, and after how many
tokens the group finishes, relative to the length of its longest sample. `first` with 4 of 8
finishes after {share:.0f} %, but its samples are {bias:.0f} % shorter. `random` and
`balanced_length` select samples of nearly the usual length, and the group finishes only a little
before its longest sample.
"""


DELTAS = {"0.0001": "learning rate 1e-4", "1e-06": "learning rate 1e-6"}


def weight_delta() -> Figure:
    bars = [
        (f"{DELTAS[rate]}: {'delta' if kind == 'delta size' else 'changed tensors, whole'}", share)
        for rate, kind, share in delta_shares()
        if kind != "changed values"
    ]
    return bar_chart(
        [(label, share, f"{share:.1f} %") for label, share in bars],
        xlabel="size, per cent of the weights file",
    )


def delta_shares() -> list[tuple[str, str, float]]:
    """Learning rate, what is sent, and its per cent of the file, for each row of the record."""
    rows = record("weight_delta")["rows"]
    parts = [re.match(r"learning rate (\S+) .*: (delta size|changed \w+)", r["what"]) for r in rows]
    shares = [float(row["value"].partition("%")[0]) for row in rows]
    return [(p[1], p[2], share) for p, share in zip(parts, shares, strict=True) if p]


def weight_delta_text() -> str:
    shares = [share for _, kind, share in delta_shares() if kind == "delta size"]
    return f"""
After a GRPO step (all parameters trained, bfloat16) only the changed values were sent, as a
delta. The baseline sends each changed tensor whole. At a learning rate of 1e-4 the delta has
{shares[0]} % of the bytes of the file. At 1e-6, which is usual for large models, it has
{shares[1]} %. The baseline saves almost nothing, because nearly every tensor changes in each
step.
"""


PUBLISHED = "100m"
VLLM = "vLLM's server, reload_weights"
PUBLICATIONS = {
    "shared directory": "shared directory",
    "HTTP": "HTTP",
    "HTTP, delta": "HTTP, delta",
    VLLM: "vLLM's server,\nreload_weights",
}
PUBLICATION_PHASES = {"upload": "upload", "paused": "paused", "first_token": "first token"}


def weight_publish() -> Figure:
    """Phases of a publication of the model with 100 million parameters, by way of transfer."""
    series = {
        label: [1000 * _publication_seconds(arm, phase) for arm in PUBLICATIONS]
        for phase, label in PUBLICATION_PHASES.items()
    }
    return grouped_bars(list(PUBLICATIONS.values()), series, ylabel="milliseconds")


def _publication_seconds(arm: str, phase: str) -> float:
    found = record("weight_publish")["raw"][PUBLISHED]["arms"][arm]
    return float(statistics.median(each[phase] for each in found))


def weight_publish_text() -> str:
    total = {arm: f"{_publication_seconds(arm, 'total'):.2f} s" for arm in PUBLICATIONS}
    load = _publication_seconds("HTTP", "load")
    return f"""
A trainer published weights of 100 million parameters in bfloat16 to a server on the same machine,
which serves them in float32, while no sample was running. From the call to the first token of the
new version it took {total["HTTP"]} where the client uploaded the weights over loopback. The
safetensors library writing a directory that the server reads took
{total["shared directory"]}; vLLM's server, which reads it without checks and
keeps no version to go back to, took {total[VLLM]}. The load of the weights into the model took
{load:.2f} s of the first one, during which sampling is paused. A delta saves bytes, not time, on a
connection that is as fast as this one: it took {total["HTTP, delta"]}.
"""


CONSTRAINTS = ("top_p 0.8", "top_k 5", "min_p 0.1", "allowed_token_ids", "structured_outputs")


def out_of_band(constraint: str) -> list[float]:
    """Per cent of tokens out of band, without and with supports."""
    found = re.findall(r"\(([\d.]+)% out", cell("support_replay", f"{constraint}, no drafts"))
    return [float(share) for share in found]


def support_replay() -> Figure:
    without, replayed = zip(*map(out_of_band, CONSTRAINTS), strict=True)
    series = {"from the model's logits": list(without), "over the supports": list(replayed)}
    return grouped_bars(list(CONSTRAINTS), series, ylabel="per cent of the tokens out of band")


def support_replay_text() -> str:
    mean = cell("support_replay", "top_p 0.8, no drafts").partition(" ")[0]
    server = cell("support_replay", "server, no drafts").removesuffix(" per 1,000 tokens")
    trainer = cell("support_replay", "trainer").partition(" per")[0]
    return f"""
The bundled model (float32) sampled under constraints, and `coppice.train` computed the same tokens
with the same weights. The importance ratio of each token should be 1; out of band are ratios that
differ from it by more than 1 %. The baseline normalises over the whole vocabulary, as trainers do:
with top_p 0.8 its mean ratio is {mean}, and {out_of_band("top_p 0.8")[0]:.0f} % of the tokens are
out of band. With [supports](../reference/sampling-support.md) no token is. Supports have a cost in
the server: {server} per 1,000 tokens of this very small model. In the trainer they save
time if they list their ids: {trainer} per 1,000 tokens, for forward and backward over the logits
of a vocabulary of 151,936 with 64 ids per token.
"""


CHARTS = (
    chart(policy_update, policy_update_text, "Time of a policy update", "trainer_step"),
    chart(memory, memory_text, "Memory of a policy update", "trainer_step"),
    chart(length_bias, length_bias_text, "Finishing a group early", "length_bias"),
    chart(
        support_replay,
        support_replay_text,
        "Importance ratios of constrained samples",
        "support_replay",
    ),
    chart(weight_delta, weight_delta_text, "Size of a weights delta", "weight_delta"),
    chart(weight_publish, weight_publish_text, "Publication of weights", "weight_publish"),
)
