"""Metrics of vLLM that gateways read, as the service exports them, without an engine.

The names are those of the model server protocol of the Gateway API inference extension:
https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/003-model-server-protocol
"""

from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.parser import text_string_to_metric_families

from service.observability.metrics import Metrics
from tests.engine.seedling import MODEL

pytestmark = pytest.mark.slow

BLOCK_SIZE = 32
NUM_BLOCKS = 64
MAX_ADAPTERS = 2


class Exported:
    """vLLM's own statistics logger, in a registry of the test, and what the service exports."""

    def __init__(self, config: Any, num_engines: int = 1) -> None:
        from vllm.v1.metrics.loggers import PrometheusStatLogger
        from vllm.v1.metrics.perf import PerfMetricsProm

        registry = CollectorRegistry()
        classes = {"_gauge_cls": Gauge, "_counter_cls": Counter, "_histogram_cls": Histogram}
        own: dict[str, Any] = {n: partial(kind, registry=registry) for n, kind in classes.items()}
        own["_perf_metrics_cls"] = type("PerfMetrics", (PerfMetricsProm,), dict(own))
        logger: Any = type("StatLogger", (PrometheusStatLogger,), own)
        self._logger = logger(config, list(range(num_engines)))
        self._logger.log_engine_initialized()
        self._metrics = Metrics()
        self._metrics.vllm_registry = registry

    def record(self, **stats: Any) -> None:
        from vllm.v1.metrics.stats import SchedulerStats

        self._logger.record(SchedulerStats(**stats), None)

    def families(self, name: str) -> list[Metric]:
        text = self._metrics.render().decode()
        return [one for one in text_string_to_metric_families(text) if one.name == name]

    def family(self, name: str) -> Metric:
        (found,) = self.families(name)
        return found


@pytest.fixture(scope="module")
def config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        str(MODEL), block_size=BLOCK_SIZE, enable_lora=True, max_loras=MAX_ADAPTERS
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


@pytest.fixture
def exported(config: Any, monkeypatch: pytest.MonkeyPatch) -> Exported:
    from vllm.v1.metrics import loggers

    # It would unregister the metrics of an engine in this process.
    monkeypatch.setattr(loggers, "unregister_vllm_metrics", lambda: None)
    return Exported(config)


def test_load_is_exported_in_the_gauges_of_the_protocol(exported: Exported) -> None:
    exported.record(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.25)
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
    }
    for name, value in expected.items():
        family = exported.family(name)
        assert family.type == "gauge"
        assert [sample.value for sample in family.samples] == [value]


def test_blocks_of_the_cache_are_exported(exported: Exported) -> None:
    (sample,) = exported.family("vllm:cache_config_info").samples
    assert sample.labels["block_size"] == str(BLOCK_SIZE)
    assert sample.labels["num_gpu_blocks"] == str(NUM_BLOCKS)


def test_adapters_have_the_names_of_callers_and_one_series(exported: Exported) -> None:
    exported.record(running_lora_adapters={"policy@step-7/1": 1, "judge@v1/2": 1})
    exported.record(
        running_lora_adapters={"policy@step-8/3": 2, "policy@step-7/1": 1},
        waiting_lora_adapters={"judge@v1/2": 1},
    )
    family = exported.family("vllm:lora_requests_info")
    (sample,) = family.samples
    assert family.type == "gauge"
    assert sample.labels == {
        "max_lora": str(MAX_ADAPTERS),
        "running_lora_adapters": "policy",
        "waiting_lora_adapters": "judge",
    }


def test_adapters_of_several_engines_are_not_exported(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.metrics import loggers

    monkeypatch.setattr(loggers, "unregister_vllm_metrics", lambda: None)
    exported = Exported(config, num_engines=2)
    exported.record(running_lora_adapters={"policy@step-7/1": 1})
    assert exported.families("vllm:lora_requests_info") == []
    running = exported.family("vllm:num_requests_running")
    assert [sample.labels["engine"] for sample in running.samples] == ["0", "1"]


def test_adapters_of_an_idle_server_have_no_series(exported: Exported) -> None:
    assert exported.family("vllm:lora_requests_info").samples == []
