"""The Prometheus metrics of the model registry.

Invariants:
- Between scrapes only facts are counted; a scrape takes time for each state, not for each version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forged.kernel.bus import Bus
from forged.kernel.messages import Fact, Record
from forged.registry.book.state import RegistryState
from forged.registry.messages import ModelRegistered, ModelRolledBack, ModelTransitioned, ValidationRecorded
from forged.registry.model import DeploymentState

COUNTED: Sequence[tuple[type[Fact], str, str]] = (
    (ModelRegistered, "forged_model_registrations", "Versions that were registered or imported"),
    (ModelTransitioned, "forged_model_transitions", "Changes of the state of a version"),
    (ModelRolledBack, "forged_model_rollbacks", "Versions that were taken out of service"),
    (ValidationRecorded, "forged_model_validations", "Validations that were recorded"),
)
"""Facts that are counted, with the name of the counter and what it counts."""


class ModelCollector(Collector):
    """Collects the metrics about all models."""

    def __init__(self, bus: Bus, state: RegistryState) -> None:
        self._state = state
        self._facts = {fact.__name__: 0 for fact, _, _ in COUNTED}
        bus.on_publish.append(self._count)

    def _count(self, records: Sequence[Record]) -> None:
        for kind, number in Counter(record.type for record in records).items():
            if kind in self._facts:
                self._facts[kind] += number

    def collect(self) -> Iterable[Metric]:
        for fact, name, text in COUNTED:
            yield CounterMetricFamily(name, text, value=self._facts[fact.__name__])
        yield GaugeMetricFamily("forged_models", "Models in the registry", value=len(self._state.ids))
        versions = GaugeMetricFamily("forged_model_versions", "Versions in the registry", labels=["state"])
        for state in DeploymentState:
            versions.add_metric([state.value], len(self._state.index.having(("state", state))))
        yield versions
        yield GaugeMetricFamily(
            "forged_registry_bytes", "Bytes that the registry is charged with", value=self._state.shares.used
        )
