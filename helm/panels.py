"""Dashboard panels of the detail rows. Other rows: helm/overview.py, helm/*_panels.py.

A test checks every series named here against the server's and vLLM's metrics.
"""

from helm.overview import OVERVIEW, TRAINER
from helm.panel import Panel, level, quantiles, rate, share
from helm.session_panels import SESSIONS
from helm.speculation_panels import DRAFTER, GRAPHS, SPECULATION

ROWS: dict[str, list[Panel]] = {
    "Overview": OVERVIEW,
    "Trainer": TRAINER,
    "Throughput": [
        Panel(
            "Sampled tokens",
            "suffix: tok/s",
            "Completion tokens per second of finished samples.",
            {"{{instance}}": rate("coppice_completion_tokens_total", "instance")},
        ),
        Panel(
            "Tokens computed by the engine",
            "suffix: tok/s",
            "vLLM's tokens per second: prefilled prompt tokens and decoded tokens.",
            {
                "prompt": rate("vllm:prompt_tokens_total", "job"),
                "generation": rate("vllm:generation_tokens_total", "job"),
            },
        ),
        Panel(
            "Running samples by replica",
            "suffix: samples",
            "Admitted samples count against limits.max_samples_running.",
            {
                "admitted {{instance}}": level("coppice_samples_admitted"),
                "in the engine {{instance}}": level("coppice_samples_running"),
                "decoding {{instance}}": level("vllm:num_requests_running"),
            },
        ),
    ],
    "Groups and queue": [
        Panel(
            "Groups by outcome",
            "suffix: groups/s",
            "Finished groups per second.",
            {"{{outcome}}": rate("coppice_groups_total", "outcome")},
        ),
        Panel(
            "Queue time in the engine",
            "s",
            "Time that samples wait in vLLM before their first step.",
            quantiles("vllm:request_queue_time_seconds"),
        ),
        Panel(
            "Queued samples in the engine",
            "suffix: samples",
            "Samples that wait in vLLM because the batch or the KV cache is full.",
            {"{{instance}}": level("vllm:num_requests_waiting")},
        ),
    ],
    "Agent sessions": SESSIONS,
    "Weights versions": [
        Panel(
            "Active weights version",
            "none",
            "Sequence number; replicas with different numbers serve different weights.",
            {"{{instance}}": level("coppice_weights_sequence")},
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
            "KV cache in use by replica",
            "percentunit",
            "Near 100 %, samples are preempted and prefilled again.",
            {"{{instance}}": level("vllm:kv_cache_usage_perc")},
        ),
        Panel(
            "Preemptions by replica",
            "suffix: samples/s",
            "Samples per second whose KV cache was freed for other samples.",
            {"{{instance}}": rate("vllm:num_preemptions_total", "instance")},
        ),
        Panel(
            "Retained KV of paused sessions",
            "suffix: blocks/s",
            "Blocks per second that a session's next call used (returned), or that were released.",
            {"{{reason}}": f"{rate('coppice_session_kv_released_blocks_total', 'reason')} > 0"},
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
            "suffix: exports/s",
            "Requested exports per second: a handle, or the reason for none.",
            {"{{outcome}}": f"{rate('coppice_kv_exports_total', 'outcome')} > 0"},
        ),
        Panel(
            "Downloads",
            "suffix: downloads",
            "Open downloads.",
            {"{{instance}}": level("coppice_kv_transfers")},
        ),
        Panel(
            "Prompt KV sent",
            "Bps",
            "Bytes per second over HTTP; reads through shared memory are not counted.",
            {"{{instance}}": rate("coppice_kv_sent_bytes_total", "instance")},
        ),
        Panel(
            "Reads of expired prompt KV",
            "reqps",
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
            "suffix: problems/s",
            "Problem documents per second, by problem code.",
            {"{{problem}}": f"{rate('coppice_problems_total', 'problem')} > 0"},
        ),
        Panel(
            "Requests by status",
            "reqps",
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
            "none",
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
