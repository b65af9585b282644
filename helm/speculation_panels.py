"""Dashboard panels of speculation: speedup, drafter training and CUDA graphs."""

from helm.panel import Panel
from helm.queries import level, rate, share

SPECULATION = [
    Panel(
        "What drafts are worth",
        "short",
        "Time that the last tokens would have taken without drafts, over what they took.",
        {"{{instance}}": level("coppice_speculation_gain_ratio")},
    ),
    Panel(
        "Drafted tokens accepted",
        "percentunit",
        "By whose text they were taken from.",
        {
            "{{scope}}": f"{rate('coppice_speculation_accepted_tokens_total', 'scope')} / "
            f"({rate('coppice_speculation_drafted_tokens_total', 'scope')} > 0)"
        },
    ),
    Panel(
        "Steps by what became of their drafts",
        "short",
        "Drafted, or why not; checked: left out to measure; resting: they cost more than they "
        "saved.",
        {"{{choice}}": rate("coppice_speculation_steps_total", "choice")},
    ),
    Panel(
        "Tokens gained a draft",
        "short",
        "Accepted tokens for every draft that was verified.",
        {
            "accepted a draft": share(
                "vllm:spec_decode_num_accepted_tokens_total",
                "vllm:spec_decode_num_drafts_total",
            )
        },
    ),
]

DRAFTER = [
    Panel(
        "Drafted tokens accepted, by drafter and weights",
        "percentunit",
        "Falls when the weights change, and comes back with drafters that have learned from them.",
        {
            "{{drafter}} for {{weights}}": level(
                "coppice_drafter_acceptance_ratio", "drafter, weights"
            )
        },
    ),
    Panel(
        "Trials of drafters",
        "short",
        "New ones a second: accepted as often as the one before, or sent away, or not loaded.",
        {"{{outcome}}": rate("coppice_drafter_trials_total", "outcome")},
    ),
    Panel(
        "Training",
        "short",
        "1 for what it does: paused while the engine is busy; failed: not any more.",
        {"{{training}}": level("coppice_drafter_training", "training")},
    ),
    Panel(
        "Tokens trained on",
        "short",
        "Since the drafter was made.",
        {"{{instance}}": level("coppice_drafter_trained_tokens")},
    ),
    Panel(
        "Loss in training",
        "short",
        "Nats a token of late; it rises where the weights begin to say something else.",
        {"{{instance}}": level("coppice_drafter_loss")},
    ),
    Panel(
        "Samples not learned from",
        "short",
        "A second: they ended faster than training could be told of them.",
        {"{{instance}}": rate("coppice_drafter_samples_dropped_total", "instance")},
    ),
]

GRAPH_STEPS = "coppice_graph_steps_total"
HIT, DECODED = 'outcome="hit"', 'outcome=~"hit|miss"'

GRAPHS = [
    Panel(
        "Decode steps that found a planned graph",
        "percentunit",
        "Steps that compute prompts too are not in it.",
        {"hits": f"{rate(GRAPH_STEPS, 'job', HIT)} / ({rate(GRAPH_STEPS, 'job', DECODED)} > 0)"},
    ),
    Panel(
        "Steps without a planned graph, by shape",
        "short",
        "A second; samples are rounded up to a power of two, and 0 tokens are uneven drafts.",
        {
            "{{samples}} samples of {{tokens}} tokens": rate(
                "coppice_graph_misses_total", "samples, tokens"
            )
        },
    ),
    Panel(
        "Bytes of graphs",
        "bytes",
        "On a rank: allowed, estimated by the plan, and measured when they were captured.",
        {"{{kind}}": level("coppice_graph_bytes", "kind")},
    ),
]
