"""The Prometheus metrics of checkpoints and of the memory from which emergency checkpoints are saved.

Invariants:
- Between scrapes only facts are counted; a scrape takes time for each job, not for each checkpoint.
- At most `JOBS_MAX` jobs have a label: of the jobs that train, those with the oldest latest checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forged.catalog.catalog_index import CatalogIndex
from forged.catalog.messages import (
    CheckpointCollected,
    CheckpointCompleted,
    CheckpointCorrupted,
    CheckpointFailed,
    CheckpointRestored,
    EmergencyCheckpointFailed,
    EmergencyCheckpointSaved,
)
from forged.catalog.model import CheckpointState
from forged.kernel.bus import Bus
from forged.kernel.messages import Fact, Record

JOBS_MAX = 100
COUNTED: Sequence[tuple[type[Fact], str, str]] = (
    (CheckpointCompleted, "forged_checkpoints_completed", "Checkpoints that were saved"),
    (CheckpointFailed, "forged_checkpoints_failed", "Checkpoints that could not be saved"),
    (CheckpointCorrupted, "forged_checkpoints_corrupted", "Checkpoints that were found damaged"),
    (CheckpointCollected, "forged_checkpoints_collected", "Checkpoints that were deleted"),
    (CheckpointRestored, "forged_checkpoints_restored", "Restores from a checkpoint"),
    (EmergencyCheckpointSaved, "forged_checkpoints_emergency", "Checkpoints that were saved from memory"),
    (EmergencyCheckpointFailed, "forged_checkpoints_emergency_failed", "States in memory that could not be saved"),
)
"""Facts that are counted, with the name of the counter and what it counts."""


class CheckpointCollector(Collector):
    """Collects the metrics about the checkpoints of all jobs."""

    def __init__(
        self,
        bus: Bus,
        index: CatalogIndex,
        is_training: Callable[[str], bool],
        slot_bytes: Callable[[], tuple[int, int]],
        wall: Callable[[], float],
    ) -> None:
        self._index = index
        self._is_training = is_training
        self._slot_bytes = slot_bytes
        """The bytes of all slots, and their limit."""
        self._wall = wall
        self._facts = {fact.__name__: 0 for fact, _, _ in COUNTED}
        bus.on_publish.append(self._count)

    def _count(self, records: Sequence[Record]) -> None:
        counts = self._facts
        for kind, number in Counter(record.type for record in records).items():
            if kind in counts:
                counts[kind] += number

    def collect(self) -> Iterable[Metric]:
        for fact, name, text in COUNTED:
            yield CounterMetricFamily(name, text, value=self._facts[fact.__name__])
        states = GaugeMetricFamily("forged_checkpoints", "Checkpoints in the catalogue", labels=["state"])
        for state in CheckpointState:
            states.add_metric([state.value], self._index.states[state])
        yield states
        yield GaugeMetricFamily(
            "forged_checkpoint_bytes", "Bytes of all checkpoints in the catalogue", value=self._index.total_size()
        )
        ages = GaugeMetricFamily(
            "forged_checkpoint_age_seconds",
            "Seconds since the newest complete checkpoint of a job that trains was begun",
            labels=["job"],
        )
        for age_s, job in nlargest(JOBS_MAX, self._ages()):
            ages.add_metric([job], age_s)
        yield ages
        used, limit = self._slot_bytes()
        yield GaugeMetricFamily("forged_slot_bytes", "Bytes of the slots for emergency checkpoints", value=used)
        yield GaugeMetricFamily("forged_slot_bytes_max", "The limit of these bytes", value=limit)

    def _ages(self) -> Iterator[tuple[float, str]]:
        now = self._wall()
        for meta in self._index.newest_complete():
            if self._is_training(meta.training_run_id):
                yield max(0.0, now - meta.created_at), meta.training_run_id
