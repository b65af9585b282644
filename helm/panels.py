"""Dashboard panels, by row. Those of speculation and CUDA graphs: helm/speculation_panels.py.

A test checks every series named here against the server's and vLLM's metrics.
"""

from helm.panel import Panel, level, quantiles, rate, share
from helm.speculation_panels import DRAFTER, GRAPHS, SPECULATION

ROWS: dict[str, list[Panel]] = {
    "Throughput": [
        Panel(
            "Sampled tokens",
            "short",
            "Completion tokens per second of finished samples.",
            {"{{instance}}": rate("coppice_completion_tokens_total", "instance")},
        ),
        Panel(
            "Tokens computed by the engine",
            "short",
            "vLLM's tokens per second: prefilled prompt tokens and decoded tokens.",
            {
                "prompt": rate("vllm:prompt_tokens_total", "job"),
                "generation": rate("vllm:generation_tokens_total", "job"),
            },
        ),
        Panel(
            "Running samples",
            "short",
            "Admitted samples count against limits.max_samples_running.",
            {
                "admitted {{instance}}": level("coppice_samples_admitted"),
                "in the engine {{instance}}": level("coppice_samples_running"),
                "decoding {{instance}}": level("vllm:num_requests_running"),
            },
        ),
    ],
    "Groups and stragglers": [
        Panel(
            "Groups by outcome",
            "short",
            "Finished groups per second.",
            {"{{outcome}}": rate("coppice_groups_total", "outcome")},
        ),
        Panel(
            "Group duration",
            "s",
            "Time from a group's submission to its last sample.",
            quantiles("coppice_group_duration_seconds"),
        ),
        Panel(
            "Stragglers",
            "short",
            "Duration of a group's slowest sample divided by that of its median sample.",
            quantiles("coppice_group_straggler_ratio"),
        ),
        Panel(
            "Samples by finish reason",
            "short",
            "Finished samples per second. surplus: not needed any more; deadline: out of time.",
            {"{{finish_reason}}": rate("coppice_samples_total", "finish_reason")},
        ),
        Panel(
            "Queue time in the engine",
            "s",
            "Time that samples wait in vLLM before their first step.",
            quantiles("vllm:request_queue_time_seconds"),
        ),
        Panel(
            "Queued samples in the engine",
            "short",
            "Samples that wait in vLLM because the batch or the KV cache is full.",
            {"{{instance}}": level("vllm:num_requests_waiting")},
        ),
    ],
    "Weights versions and staleness": [
        Panel(
            "Active weights version",
            "short",
            "Sequence number; replicas with different numbers serve different weights.",
            {"{{instance}}": level("coppice_weights_sequence")},
        ),
        Panel(
            "Replicas behind",
            "short",
            "Replicas that serve an older version than the target, or that failed to load it.",
            {
                "behind": level("coppice_weights_replicas_behind"),
                "failed": level("coppice_weights_replicas_failed"),
            },
        ),
        Panel(
            "Stale samples",
            "percentunit",
            "Share of samples with tokens of more than one weights version.",
            {"stale": share("coppice_samples_stale_total", "coppice_samples_total")},
        ),
        Panel(
            "Activation pause",
            "s",
            "Time that sampling was paused while weights were loaded.",
            quantiles("coppice_activation_paused_seconds"),
        ),
    ],
    "Prefix sharing": [
        Panel(
            "Prefix cache hits across groups",
            "percentunit",
            "Share of prompt tokens that a group's first sample found in the prefix cache.",
            {"cached": share("coppice_prompt_tokens_cached_total", "coppice_prompt_tokens_total")},
        ),
        Panel(
            "Prefix cache hits in the engine",
            "percentunit",
            "Share of prompt tokens over all samples, including siblings of one group.",
            {"hits": share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")},
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            "Near 100 %, samples are preempted and prefilled again.",
            {"{{instance}}": level("vllm:kv_cache_usage_perc")},
        ),
        Panel(
            "Preemptions",
            "short",
            "Samples per second whose KV cache was freed for other samples.",
            {"{{instance}}": rate("vllm:num_preemptions_total", "instance")},
        ),
    ],
    "Speculation": SPECULATION,
    "Drafter": DRAFTER,
    "CUDA graphs": GRAPHS,
    "Prompt KV": [
        Panel(
            "Prompt KV arena",
            "bytes",
            "Free, reserved for writing, leased to trainers, or quarantined after a lease expired.",
            {"{{state}}": level("coppice_kv_bytes", "state")},
        ),
        Panel(
            "Exports by outcome",
            "short",
            "Requested exports per second: a handle, or the reason for none.",
            {"{{outcome}}": f"{rate('coppice_kv_exports_total', 'outcome')} > 0"},
        ),
        Panel(
            "Handles",
            "short",
            "Handles with a running lease, or of a running rollout.",
            {"{{instance}}": level("coppice_kv_handles")},
        ),
        Panel(
            "Downloads",
            "short",
            "Open downloads, including waiting ones, and the limit of concurrent ones.",
            {
                "{{instance}}": level("coppice_kv_transfers"),
                "limit {{instance}}": level("coppice_kv_transfers_limit"),
            },
        ),
        Panel(
            "Prompt KV sent",
            "Bps",
            "Bytes per second over HTTP; reads through shared memory are not counted.",
            {"{{instance}}": rate("coppice_kv_sent_bytes_total", "instance")},
        ),
        Panel(
            "Reads of expired prompt KV",
            "short",
            "Requests per second after the lease expired, or for another weights version.",
            {
                "{{problem}}": rate(
                    "coppice_problems_total",
                    "problem",
                    'problem=~"kv_gone|kv_not_found|kv_version_conflict"',
                )
            },
        ),
    ],
    "Errors": [
        Panel(
            "Problems",
            "short",
            "Problem documents per second, by problem code.",
            {"{{problem}}": f"{rate('coppice_problems_total', 'problem')} > 0"},
        ),
        Panel(
            "Requests by status",
            "short",
            "Responses per second, by HTTP status.",
            {"{{code}}": rate("coppice_requests_total", "code")},
        ),
        Panel(
            "Request duration",
            "s",
            "95th percentile by route.",
            {
                "{{route}}": "histogram_quantile(0.95, "
                + rate("coppice_request_duration_seconds_bucket", "le, route")
                + ")"
            },
        ),
        Panel(
            "Heartbeat",
            "s",
            "Time since the engine's last heartbeat; /livez fails if it is too long.",
            {"{{instance}}": level("coppice_engine_heartbeat_age_seconds")},
        ),
        Panel(
            "State",
            "short",
            "1 or 0: ready for requests, live, draining, paused.",
            {
                f"{name} {{{{instance}}}}": level(f"coppice_{name}")
                for name in ("ready", "live", "draining", "paused")
            },
        ),
        Panel(
            "Memory of the service",
            "bytes",
            "Resident memory of the HTTP process, without the engine's processes.",
            {"{{instance}}": level("process_resident_memory_bytes")},
        ),
    ],
}
