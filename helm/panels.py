"""The panels of the dashboard, row by row: what each shows, in which unit, and by which queries.

Every query is narrowed to the release that the reader has chosen; a test holds every series that is
named here against the server's own metrics and vLLM's.
"""

from dataclasses import dataclass

CHOSEN = 'namespace=~"$namespace",job=~"$job"'


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: PromQL by legend; CHOSEN stands for the labels of the release."""

    title: str
    unit: str
    description: str
    queries: dict[str, str]


def rate(series: str, by: str, matchers: str = "") -> str:
    chosen = f"{CHOSEN},{matchers}" if matchers else CHOSEN
    return f"sum by ({by}) (rate({series}{{{chosen}}}[$__rate_interval]))"


def level(series: str, by: str = "instance") -> str:
    return f"max by ({by}) ({series}{{{CHOSEN}}})"


def quantile(q: float, series: str) -> str:
    return f"histogram_quantile({q}, {rate(series + '_bucket', 'le')})"


def quantiles(series: str) -> dict[str, str]:
    return {"median": quantile(0.5, series), "95 %": quantile(0.95, series)}


def share(part: str, whole: str, matchers: str = "") -> str:
    return f"{rate(part, 'job', matchers)} / ({rate(whole, 'job')} > 0)"


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
    "Speculation": [
        Panel(
            "Drafted tokens accepted",
            "percentunit",
            "Empty without speculation.",
            {
                "accepted": share(
                    "vllm:spec_decode_num_accepted_tokens_total",
                    "vllm:spec_decode_num_draft_tokens_total",
                )
            },
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
