"""Every alert over series that make it fire, and over similar ones that do not."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.tools import RULES, promtool

MINUTES = 60
RELEASE = 'job="coppice",namespace="rl"'
A, B = f'{RELEASE},instance="a:8000"', f'{RELEASE},instance="b:8000"'
Series = dict[str, str]


@dataclass(frozen=True)
class Case:
    """`fires` and `quiet`: values of series at each of 60 minutes, in promtool's notation."""

    alert: str
    severity: str
    fires: Series
    quiet: Series
    labels: dict[str, str] = field(default_factory=dict)


def levels(name: str, value: float, labels: str = A) -> Series:
    return {f"{name}{{{labels}}}": f"{value}x{MINUTES}"}


def counts(name: str, a_minute: float, labels: str = A) -> Series:
    return {f"{name}{{{labels}}}": f"0+{a_minute}x{MINUTES}"}


def problems(problem: str, a_minute: float) -> Series:
    return counts("coppice_problems_total", a_minute, f'{A},problem="{problem}"')


def requests(a_minute: float) -> Series:
    return counts("coppice_requests_total", a_minute, f'{A},route="/v1/rollouts",code="200"')


def groups(done: float, failed: float) -> Series:
    return {
        **counts("coppice_groups_total", done, f'{A},outcome="done"'),
        **counts("coppice_groups_total", failed, f'{A},outcome="failed"'),
    }


def sessions(finished: float, expired: float) -> Series:
    return {
        **counts("coppice_sessions_ended_total", finished, f'{A},reason="finished"'),
        **counts("coppice_sessions_ended_total", expired, f'{A},reason="expired"'),
    }


def exports(handle: float, **reasons: float) -> Series:
    found = [
        counts("coppice_kv_exports_total", a_minute, f'{A},outcome="{outcome}"')
        for outcome, a_minute in {"handle": handle, **reasons}.items()
    ]
    return {name: values for each in found for name, values in each.items()}


def arena(leased: float, quarantined: float, *, free: float = 10, labels: str = A) -> Series:
    states = {"leased": leased, "quarantined": quarantined, "free": free, "reserved": 0}
    return {
        f'coppice_kv_bytes{{{labels},state="{state}"}}': f"{num_bytes}x{MINUTES}"
        for state, num_bytes in states.items()
    }


def waits(seconds: float) -> Series:
    name = "vllm:request_queue_time_seconds_bucket"
    bounds = ("1", "60", "120", "+Inf")
    below = [9 if seconds <= float(bound) else 0 for bound in bounds]
    return {
        f'{name}{{{A},le="{bound}"}}': f"0+{count}x{MINUTES}"
        for bound, count in zip(bounds, below, strict=True)
    }


CASES = [
    Case(
        "CoppiceEngineStalled",
        "critical",
        {**levels("coppice_live", 0), **levels("coppice_live", 1, B)},
        levels("coppice_live", 1),
        {"instance": "a:8000"},
    ),
    Case(
        "CoppiceNoReadyReplica",
        "critical",
        {**levels("coppice_ready", 0), **levels("coppice_ready", 0, B)},
        {**levels("coppice_ready", 0), **levels("coppice_ready", 1, B)},
    ),
    Case(
        "CoppiceMetricsAbsent",
        "critical",
        levels("coppice_build_info", 1, 'job="other",namespace="rl"'),
        levels("coppice_build_info", 1),
        {"namespace": ""},
    ),
    Case("CoppiceTargetDown", "warning", levels("up", 0), levels("up", 1), {"instance": "a:8000"}),
    Case(
        "CoppiceReplicaRestarting",
        "warning",
        {f"process_start_time_seconds{{{A}}}": "1x10 600x10 1200x10 1800x30"},
        {f"process_start_time_seconds{{{A}}}": "1x30 1800x30"},
        {"instance": "a:8000"},
    ),
    Case(
        "CoppiceErrorsCritical",
        "critical",
        {**requests(20), **problems("engine_dead", 6)},
        # Backpressure is no error, and one error in two requests is no trend.
        {**requests(20), **problems("overloaded", 15), **problems("internal", 3)},
    ),
    Case(
        "CoppiceErrorsHigh",
        "warning",
        {**requests(20), **problems("internal", 2)},
        {**requests(1), **problems("internal", 1)},
    ),
    Case("CoppiceGroupsFailing", "warning", groups(20, 2), groups(1, 1)),
    Case(
        "CoppiceSamplesNearLimit",
        "warning",
        {**levels("coppice_samples_admitted", 95), **levels("coppice_samples_limit", 100)},
        {**levels("coppice_samples_admitted", 85), **levels("coppice_samples_limit", 100)},
    ),
    Case("CoppiceRequestsRefused", "warning", problems("overloaded", 2), problems("draining", 9)),
    Case(
        "CoppiceSessionsDropped",
        "warning",
        counts("coppice_sessions_dropped_total", 1),
        counts("coppice_sessions_dropped_total", 0),
    ),
    Case("CoppiceSessionsExpiring", "warning", sessions(7, 3), sessions(0.2, 0.4)),
    Case("CoppiceQueueWaitHigh", "warning", waits(100), waits(30)),
    Case(
        "CoppiceCachePressure",
        "warning",
        {**levels("vllm:kv_cache_usage_perc", 0.97), **counts("vllm:num_preemptions_total", 5)},
        {**levels("vllm:kv_cache_usage_perc", 0.97), **counts("vllm:num_preemptions_total", 1)},
        {"instance": "a:8000"},
    ),
    Case("CoppiceKvArenaFull", "warning", exports(20, arena_full=5), exports(20, arena_full=1)),
    Case(
        "CoppiceKvArenaQuarantined",
        "warning",
        arena(leased=30, quarantined=60),
        # Without prompt KV there is no arena: zero divided by zero.
        {**arena(leased=60, quarantined=30), **arena(leased=0, quarantined=0, free=0, labels=B)},
        {"instance": "a:8000"},
    ),
    Case(
        "CoppiceKvExportsFailing",
        "warning",
        {f'coppice_kv_exports_total{{{A},outcome="export_failed"}}': f"0x50 1x{MINUTES}"},
        exports(20, not_written=9),
        {"instance": "a:8000"},
    ),
    Case("CoppiceKvLeasesExpired", "warning", problems("kv_gone", 2), problems("kv_not_found", 9)),
    Case(
        "CoppiceActivationFailed",
        "warning",
        {f'coppice_problems_total{{{A},problem="activation_failed"}}': f"0x50 1x{MINUTES}"},
        problems("weights_refused", 1),
        {"instance": "a:8000"},
    ),
    Case(
        "CoppiceWeightVersionSkew",
        "warning",
        {**levels("coppice_weights_sequence", 7), **levels("coppice_weights_sequence", 8, B)},
        # Updating replicas a few minutes apart is the normal way to roll out a version.
        {
            **levels("coppice_weights_sequence", 8),
            f"coppice_weights_sequence{{{B}}}": "7x10 8x50",
        },
    ),
    Case(
        "CoppiceClusterRegistryUnavailable",
        "warning",
        levels("coppice_cluster_up", 0),
        {f"coppice_cluster_up{{{A}}}": "1x10 0x3 1x10 0x3 1x20"},
        {"instance": "a:8000"},
    ),
    Case(
        "CoppiceWeightsFailed",
        "warning",
        levels("coppice_weights_replicas_failed", 1),
        {f"coppice_weights_replicas_failed{{{A}}}": "0x10 1x5 0x45"},
    ),
    Case(
        "CoppicePausedLong",
        "warning",
        levels("coppice_paused", 1),
        {f"coppice_paused{{{A}}}": "1x10 0x10 1x10 0x30"},
        {"instance": "a:8000"},
    ),
    Case(
        "CoppicePauseLeaseEnded",
        "warning",
        {f"coppice_pause_leases_ended_total{{{A}}}": f"0x50 1x{MINUTES}"},
        {f"coppice_pause_leases_ended_total{{{A}}}": "3x60"},
        {"instance": "a:8000"},
    ),
    Case(
        "CoppiceDrainStuck",
        "warning",
        levels("coppice_draining", 1),
        {f"coppice_draining{{{A}}}": "0x40 1x20"},
        {"instance": "a:8000"},
    ),
]


def one_test(series: Series, expected: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": v} for name, v in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{MINUTES}m", "alertname": name, "exp_alerts": alerts}
            for name, alerts in expected.items()
        ],
    }


def check(tmp_path: Path, tests: list[dict[str, Any]]) -> None:
    """Runs promtool once, since it takes longer to start than to test; it names the failures."""
    file = tmp_path / "test.yaml"
    content = {
        "rule_files": [str(rules) for rules in RULES],
        "evaluation_interval": "5m",  # 12 evaluations per hour suffice
        "tests": tests,
    }
    file.write_text(yaml.safe_dump(content))
    ran = promtool("test", "rules", file)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def alert(case: Case) -> dict[str, Any]:
    """The expected alert; its summary is the rule's own, with the labels inserted."""
    labels = {"job": "coppice", "namespace": "rl", "severity": case.severity, **case.labels}
    present = {name: value for name, value in labels.items() if value}
    [rule] = [
        rule
        for group in yaml.safe_load(RULES[1].read_text())["groups"]
        for rule in group["rules"]
        if rule["alert"] == case.alert
    ]
    summary = rule["annotations"]["summary"]
    for name, value in present.items():
        summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
    annotations = {
        "summary": summary,
        "runbook_url": f"docs/operate/runbook.md#{case.alert.lower()}",
    }
    return {"exp_labels": present, "exp_annotations": annotations}


@pytest.mark.slow
def test_every_alert_fires(tmp_path: Path) -> None:
    check(tmp_path, [one_test(case.fires, {case.alert: [alert(case)]}) for case in CASES])


@pytest.mark.slow
def test_every_alert_is_quiet_in_its_quiet_case(tmp_path: Path) -> None:
    check(tmp_path, [one_test(case.quiet, {case.alert: []}) for case in CASES])


def test_cases_distinguish_firing_from_quiet(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="CoppicePausedLong"):
        check(tmp_path, [one_test(levels("coppice_paused", 1), {"CoppicePausedLong": []})])


def test_every_alert_has_its_case() -> None:
    [group] = yaml.safe_load(RULES[1].read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [case.alert for case in CASES]


def test_no_alert_fires_on_an_idle_replica(tmp_path: Path) -> None:
    """A healthy replica without traffic: no ratio of zero to zero fires."""
    idle = {
        **{name: v for case in CASES[:4] for name, v in case.quiet.items()},
        **groups(0, 0),
        **sessions(0, 0),
        **requests(0),
        **problems("internal", 0),
        **levels("coppice_ready", 1),
    }
    check(tmp_path, [one_test(idle, {case.alert: [] for case in CASES})])
