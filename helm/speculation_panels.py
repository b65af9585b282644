"""Dashboard panels of speculative decoding, drafter training and CUDA graphs."""

from helm.panel import Panel, level, rate, share

SPECULATION = [
    Panel(
        "Speedup by speculation",
        "suffix: x",
        "Estimated time of recent tokens without drafts, divided by their actual time.",
        {"{{instance}}": level("coppice_speculation_gain_ratio")},
    ),
    Panel(
        "Acceptance by source",
        "percentunit",
        "Accepted share of drafted tokens, by the source of the draft.",
        {
            "{{source}}": f"{rate('coppice_speculation_accepted_tokens_total', 'source')} / "
            f"({rate('coppice_speculation_drafted_tokens_total', 'source')} > 0)"
        },
    ),
    Panel(
        "Steps by draft decision",
        "suffix: steps/s",
        "Engine steps per second. baseline: without drafts, to measure the gain; suspended: "
        "drafting is suspended because it cost more than it saved.",
        {"{{decision}}": rate("coppice_speculation_steps_total", "decision")},
    ),
    Panel(
        "Accepted tokens per draft",
        "suffix: tokens",
        "Average number of accepted tokens of a verified draft.",
        {
            "accepted per draft": share(
                "vllm:spec_decode_num_accepted_tokens_total",
                "vllm:spec_decode_num_drafts_total",
            )
        },
    ),
]

DRAFTER = [
    Panel(
        "Acceptance by drafter and weights version",
        "percentunit",
        "Falls with new weights, and recovers with drafters that were trained on their samples.",
        {
            "{{drafter}} for {{weights}}": level(
                "coppice_drafter_acceptance_ratio", "drafter, weights"
            )
        },
    ),
    Panel(
        "Tests of new drafters",
        "suffix: tests/s",
        "Finished tests per second: promoted, rolled back for a lower acceptance, or not loaded.",
        {"{{outcome}}": rate("coppice_drafter_trials_total", "outcome")},
    ),
    Panel(
        "Drafter training",
        "none",
        "1 for the current state. paused: the engine is busy; failed: training has stopped.",
        {"{{state}}": level("coppice_drafter_training", "state")},
    ),
    Panel(
        "Training tokens",
        "suffix: tokens",
        "Tokens that the drafter was trained on since it was created.",
        {"{{instance}}": level("coppice_drafter_trained_tokens")},
    ),
    Panel(
        "Training loss",
        "suffix: nats/token",
        "Recent loss in nats per token; it rises when new weights change the distribution.",
        {"{{instance}}": level("coppice_drafter_loss")},
    ),
    Panel(
        "Samples dropped from training",
        "suffix: samples/s",
        "Samples per second that were not trained on because training could not keep up.",
        {"{{instance}}": rate("coppice_drafter_samples_dropped_total", "instance")},
    ),
]

GRAPH_STEPS = "coppice_graph_steps_total"
HIT, DECODED = 'outcome="hit"', 'outcome=~"hit|miss"'

GRAPHS = [
    Panel(
        "Planned graph hits",
        "percentunit",
        "Share of decode steps with a planned CUDA graph; steps that also prefill are not counted.",
        {"hits": f"{rate(GRAPH_STEPS, 'job', HIT)} / ({rate(GRAPH_STEPS, 'job', DECODED)} > 0)"},
    ),
    Panel(
        "Steps without a planned graph, by shape",
        "suffix: steps/s",
        "Steps per second; samples are rounded up to a power of two; uneven: mixed draft lengths.",
        {
            "{{samples}} samples of {{tokens}} tokens": rate(
                "coppice_graph_misses_total", "samples, tokens"
            )
        },
    ),
    Panel(
        "Memory of CUDA graphs",
        "bytes",
        "Per rank: the budget, the plan's estimate, and measured at capture.",
        {"{{kind}}": level("coppice_graph_bytes", "kind")},
    ),
]
