"""Dashboard panels, by row. Those about speculation are in helm/speculation_panels.py.

A test checks every series named here against the server's and vLLM's metrics.
"""

from helm.panel import Panel
from helm.queries import level, quantiles, rate, share
from helm.speculation_panels import DRAFTER, GRAPHS, SPECULATION

ROWS: dict[str, list[Panel]] = {
    "Throughput": [
        Panel(
            "Tokens sampled",
            "short",
            "Completion tokens a second, of samples that have ended.",
            {"{{instance}}": rate("coppice_completion_tokens_total", "instance")},
        ),
        Panel(
            "Tokens in the engine",
            "short",
            "What vLLM computes a second: prompts that were not cached, and samples as they grow.",
            {
                "prompt": rate("vllm:prompt_tokens_total", "job"),
                "generation": rate("vllm:generation_tokens_total", "job"),
            },
        ),
        Panel(
            "Samples under way",
            "short",
            "Admitted: everything that counts against limits.max_samples_running.",
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
            "Groups that ended, a second.",
            {"{{outcome}}": rate("coppice_groups_total", "outcome")},
        ),
        Panel(
            "Duration of a group",
            "s",
            "From its submission to its last sample.",
            quantiles("coppice_group_duration_seconds"),
        ),
        Panel(
            "Stragglers",
            "short",
            "The time of a group's last sample over that of its median one.",
            quantiles("coppice_group_straggler_ratio"),
        ),
        Panel(
            "Samples by how they end",
            "short",
            "Surplus and deadline: ended because the group had enough, or no more time.",
            {"{{finish_reason}}": rate("coppice_samples_total", "finish_reason")},
        ),
        Panel(
            "Wait for the engine",
            "s",
            "How long samples wait in vLLM before their first step.",
            quantiles("vllm:request_queue_time_seconds"),
        ),
        Panel(
            "Waiting in the engine",
            "short",
            "Samples that vLLM holds back: too many decode already, or the cache is full.",
            {"{{instance}}": level("vllm:num_requests_waiting")},
        ),
    ],
    "Versions and staleness": [
        Panel(
            "Active version",
            "short",
            "Sequence of the active weights; replicas that differ serve different weights.",
            {"{{instance}}": level("coppice_weights_sequence")},
        ),
        Panel(
            "Replicas behind",
            "short",
            "Replicas that serve an older version than is ordered, or could not get one.",
            {
                "behind": level("coppice_weights_replicas_behind"),
                "failed": level("coppice_weights_replicas_failed"),
            },
        ),
        Panel(
            "Stale samples",
            "percentunit",
            "Share of samples that hold tokens of weights that were not active when they ended.",
            {"stale": share("coppice_samples_stale_total", "coppice_samples_total")},
        ),
        Panel(
            "Pause of an activation",
            "s",
            "How long samples stood still while weights were loaded.",
            quantiles("coppice_activation_paused_seconds"),
        ),
    ],
    "Prefix sharing": [
        Panel(
            "Prompt tokens found cached",
            "percentunit",
            "By the first sample of a group: what earlier groups had computed.",
            {"cached": share("coppice_prompt_tokens_cached_total", "coppice_prompt_tokens_total")},
        ),
        Panel(
            "Prefix cache hits in the engine",
            "percentunit",
            "By all samples, siblings included.",
            {"hits": share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")},
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            "Near one, samples are preempted and computed anew.",
            {"{{instance}}": level("vllm:kv_cache_usage_perc")},
        ),
        Panel(
            "Preemptions",
            "short",
            "Samples a second that gave up their cache to others.",
            {"{{instance}}": rate("vllm:num_preemptions_total", "instance")},
        ),
    ],
    "Speculation": SPECULATION,
    "The drafter": DRAFTER,
    "CUDA graphs": GRAPHS,
    "Prompt KV": [
        Panel(
            "Arena",
            "bytes",
            "Free, being written, leased to trainers, or left alone for a while.",
            {"{{state}}": level("coppice_kv_bytes", "state")},
        ),
        Panel(
            "Prompts and paths by what became of them",
            "short",
            "Asked for a second: a handle, or why there is none.",
            {"{{outcome}}": f"{rate('coppice_kv_exports_total', 'outcome')} > 0"},
        ),
        Panel(
            "Handles",
            "short",
            "Whose lease runs, or begins when their rollout ends.",
            {"{{instance}}": level("coppice_kv_handles")},
        ),
        Panel(
            "Downloads",
            "short",
            "Under way or waiting, and how many may be under way.",
            {
                "{{instance}}": level("coppice_kv_transfers"),
                "at once {{instance}}": level("coppice_kv_transfers_limit"),
            },
        ),
        Panel(
            "Sent",
            "Bps",
            "Over HTTP; reads through shared memory are not seen here.",
            {"{{instance}}": rate("coppice_kv_sent_bytes_total", "instance")},
        ),
        Panel(
            "Not there any more",
            "short",
            "Readers a second that came when the lease was over, or asked for another version.",
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
            "Problem documents a second, by code.",
            {"{{problem}}": f"{rate('coppice_problems_total', 'problem')} > 0"},
        ),
        Panel(
            "Requests by status",
            "short",
            "Answers a second.",
            {"{{code}}": rate("coppice_requests_total", "code")},
        ),
        Panel(
            "Duration of requests",
            "s",
            "95 % of the requests to a route take less.",
            {
                "{{route}}": "histogram_quantile(0.95, "
                + rate("coppice_request_duration_seconds_bucket", "le, route")
                + ")"
            },
        ),
        Panel(
            "Heartbeat",
            "s",
            "Time since the engine's last sign of life; /livez judges by it.",
            {"{{instance}}": level("coppice_engine_heartbeat_age_seconds")},
        ),
        Panel(
            "State",
            "short",
            "1 or 0: takes requests, makes progress, is draining, is paused.",
            {
                f"{name} {{{{instance}}}}": level(f"coppice_{name}")
                for name in ("ready", "live", "draining", "paused")
            },
        ),
        Panel(
            "Memory of the service",
            "bytes",
            "Resident, of the process that answers HTTP; the engine's processes are not in it.",
            {"{{instance}}": level("process_resident_memory_bytes")},
        ),
    ],
}
