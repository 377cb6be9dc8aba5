"""The metrics about checkpoints."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from forged.catalog.catalog_index import CatalogIndex
from forged.catalog.messages import CheckpointCollected, CheckpointFailed
from forged.catalog.model import CheckpointMeta
from forged.kernel.bus import Bus
from forged.kernel.messages import Fact, Record
from forged.telemetry.checkpoint_metrics import JOBS_MAX, CheckpointCollector
from tests.catalog.records import CORRUPTED, KEEP_ALL, record
from tests.net.manual_daemon import ManualClock

NOW = 1_000.0
FAILED = CheckpointFailed("a", 1, "no space")
COLLECTED = CheckpointCollected("a", 1, 10, "surplus", "2 newer ones are restorable")


class Scraped:
    """The metrics of a catalogue with these checkpoints."""

    def __init__(self, *records: CheckpointMeta, idle: frozenset[str] = frozenset()) -> None:
        self.bus = Bus(ManualClock())
        index = CatalogIndex(KEEP_ALL)
        index.load(records)
        self._registry = CollectorRegistry(auto_describe=False)
        collector = CheckpointCollector(self.bus, index, lambda job: job not in idle, lambda: (5, 20), lambda: NOW)
        self._registry.register(collector)

    def publish(self, *facts: Fact) -> None:
        self.bus.publish([Record.of(fact, fact_id=number, at=NOW) for number, fact in enumerate(facts, 1)])

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"forged_{name}", labels)

    def jobs(self) -> dict[str, float]:
        """The ages by job."""
        families = {family.name: family for family in self._registry.collect()}
        return {one.labels["job"]: one.value for one in families["forged_checkpoint_age_seconds"].samples}


def test_checkpoints_are_counted_by_state_with_their_bytes() -> None:
    scraped = Scraped(record("a"), record("b"), record("c", state=CORRUPTED))
    assert [scraped.value("checkpoints", state=state) for state in ("complete", "corrupted", "creating")] == [2, 1, 0]
    assert scraped.value("checkpoint_bytes") == 30


def test_facts_are_counted_by_kind() -> None:
    scraped = Scraped()
    scraped.publish(FAILED, COLLECTED, COLLECTED)
    scraped.publish(FAILED)
    kinds = ("completed", "failed", "corrupted", "collected", "restored", "emergency")
    assert [scraped.value(f"checkpoints_{kind}_total") for kind in kinds] == [0, 2, 0, 2, 0, 0]


def test_age_is_that_of_the_newest_complete_checkpoint_of_a_training_job() -> None:
    scraped = Scraped(
        record("a", step=1, created_at=NOW - 70),
        record("b", step=2, created_at=NOW - 60),
        record("c", step=3, created_at=NOW - 50, state=CORRUPTED),
        record("d", training_run_id="later", created_at=NOW + 5),
        record("e", training_run_id="idle"),
        idle=frozenset({"idle"}),
    )
    assert scraped.jobs() == {"run": 60.0, "later": 0.0}


def test_only_the_jobs_with_the_oldest_checkpoints_have_a_label() -> None:
    records = (record(f"{n}", training_run_id=f"job-{n}", created_at=NOW - n) for n in range(JOBS_MAX + 10))
    jobs = Scraped(*records).jobs()
    assert len(jobs) == JOBS_MAX
    assert min(jobs.values()) == 10


def test_bytes_of_slots_are_shown_with_their_limit() -> None:
    assert [Scraped().value(name) for name in ("slot_bytes", "slot_bytes_max")] == [5, 20]
