"""Dashboard panels of the overview row and of the trainer's row."""

from helm.panel import (
    CHOSEN,
    Panel,
    highest,
    level,
    quantile,
    quantiles,
    rate,
    share,
    stat,
    total,
    total_rate,
)

SERVER_ERRORS = 'problem=~"internal|engine_dead|activation_failed|insufficient_storage"'

OVERVIEW = [
    stat("Ready replicas", "none", "Replicas that accept requests.", total("coppice_ready")),
    stat(
        "Generated tokens",
        "suffix: tok/s",
        "Tokens per second that the engines generate.",
        total_rate("vllm:generation_tokens_total"),
    ),
    stat(
        "Running samples",
        "none",
        "Samples in the engines' batches.",
        total("vllm:num_requests_running"),
    ),
    stat(
        "Waiting samples",
        "none",
        "Samples in the engines' queues.",
        total("vllm:num_requests_waiting"),
    ),
    stat(
        "KV cache in use",
        "percentunit",
        "Share of KV blocks in use, of the fullest replica. At 100 %, samples are preempted.",
        highest("vllm:kv_cache_usage_perc"),
        (0.85, 0.97),
    ),
    stat(
        "Preemptions",
        "suffix: /min",
        "Samples per minute whose KV was freed for other samples; they are prefilled again.",
        f"60 * {total_rate('vllm:num_preemptions_total')}",
        (1, 60),
    ),
    stat(
        "Time to first token, p50",
        "s",
        "Median time from a sample's arrival at the engine to its first token.",
        quantile(0.5, "vllm:time_to_first_token_seconds"),
    ),
    stat(
        "Time to first token, p99",
        "s",
        "99th percentile of the time from a sample's arrival at the engine to its first token.",
        quantile(0.99, "vllm:time_to_first_token_seconds"),
    ),
    stat(
        "Weights version",
        "none",
        "Sequence number of the newest active weights version.",
        highest("coppice_weights_sequence"),
    ),
    stat(
        "Age of the weights",
        "s",
        "Time since the newest activation of weights.",
        f"min(coppice_weights_age_seconds{{{CHOSEN}}})",
    ),
    stat(
        "Replicas behind",
        "none",
        "Replicas that serve an older version than the target version.",
        highest("coppice_weights_replicas_behind"),
        (1,),
    ),
    stat(
        "Server errors",
        "suffix: /min",
        "Errors of the server per minute. The row Errors has them by problem code.",
        f"60 * {total_rate('coppice_problems_total', SERVER_ERRORS)}",
        (0.1, 5),
    ),
]

TRAINER = [
    Panel(
        "Rollout latency",
        "s",
        "Time from a group's submission to its last sample, for which a trainer waits.",
        quantiles("coppice_group_duration_seconds"),
    ),
    Panel(
        "Stragglers",
        "suffix: x",
        "Duration of a group's slowest sample divided by that of its median sample.",
        quantiles("coppice_group_straggler_ratio"),
    ),
    Panel(
        "Samples by finish reason",
        "suffix: samples/s",
        "Finished samples per second. surplus: not needed any more; deadline: out of time.",
        {"{{finish_reason}}": rate("coppice_samples_total", "finish_reason")},
    ),
    Panel(
        "Stale samples",
        "percentunit",
        "Share of samples with tokens of more than one weights version.",
        {"stale": share("coppice_samples_stale_total", "coppice_samples_total")},
    ),
    Panel(
        "Versions and replicas behind",
        "none",
        "Difference between the newest and the oldest version served; replicas that serve an older "
        "version than the target; replicas that could not load it.",
        {
            "versions between replicas": highest("coppice_weights_skew"),
            "replicas behind": highest("coppice_weights_replicas_behind"),
            "replicas failed": highest("coppice_weights_replicas_failed"),
        },
    ),
    Panel(
        "Activation pause",
        "s",
        "Time that sampling was paused while weights were loaded.",
        quantiles("coppice_activation_paused_seconds"),
    ),
    Panel(
        "Publish time",
        "s",
        "95th percentile of the requests that upload, stage and activate weights, by route.",
        {
            "{{route}}": quantile(
                0.95,
                "coppice_request_duration_seconds",
                "le, route",
                'route=~"/v1/weights/.*"',
            )
        },
    ),
    Panel(
        "Prompt-KV handles",
        "suffix: handles",
        "Handles with a running lease, or of a running rollout.",
        {"{{instance}}": level("coppice_kv_handles")},
    ),
]
