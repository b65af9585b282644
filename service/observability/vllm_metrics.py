"""Collector that exports vLLM's own metrics, with the callers' names of LoRA adapters."""

from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

LORA_INFO = "vllm:lora_requests_info"
RUNNING = "vllm:num_requests_running"


class VllmMetrics(Collector):
    """Metrics of vLLM's registry, with adapters under the names that callers use.

    The engine loads every version of an adapter under a name of its own, NAME@VERSION/NUMBER.
    Gateways compare the names in `vllm:lora_requests_info` with the `model` of a request. vLLM
    adds a series for each combination of adapters and removes none, so only the latest is exported.
    The series do not state the engine. With several engines the latest would be that of one engine,
    so none is exported.
    """

    def __init__(self, registry: Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        families = list(self._registry.collect())
        has_one_engine = _num_engines(families) <= 1
        for family in families:
            if family.name != LORA_INFO:
                yield family
            elif has_one_engine:
                yield _latest_adapters(family)


def _num_engines(families: Iterable[Metric]) -> int:
    running = (family.samples for family in families if family.name == RUNNING)
    return len({sample.labels["engine"] for samples in running for sample in samples})


def _latest_adapters(family: Metric) -> Metric:
    """The series with the latest time, which is its value."""
    exported = Metric(family.name, family.documentation, family.type)
    latest = max(family.samples, key=lambda sample: sample.value, default=None)
    if latest is not None:
        labels = {
            label: _adapter_names(value) if label.endswith("_lora_adapters") else value
            for label, value in latest.labels.items()
        }
        exported.add_sample(latest.name, labels, latest.value)
    return exported


def _adapter_names(lora_names: str) -> str:
    return ",".join(sorted({name.partition("@")[0] for name in lora_names.split(",") if name}))
