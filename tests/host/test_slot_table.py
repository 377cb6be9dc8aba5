"""Which slots there are, whose they are, and which are needed no more."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from forged.errors import RequestRefused
from forged.host.model import SlotContents, SlotOwner, SlotRecord
from forged.host.slot_table import LEFT_S, WORKER_SLOTS_MAX, SlotLimits, SlotTable, staged_checkpoints
from forged.shares import Holder

TEAM, OTHER = Holder("job run", "team"), Holder("job other", "other")
GIB = 1 << 30


def record(slot_id: str, worker: str = "a", at: float = 1.0, **changes: Any) -> SlotRecord:
    return replace(
        SlotRecord(slot_id, "run", worker, worker.encode(), GIB, "/ckpt", is_trusted=True, holder=TEAM, opened_at=at),
        **changes,
    )


def contents(slot_id: str, step: int, rank: int = 0, world_size: int = 2, **changes: Any) -> SlotContents:
    found = SlotContents(slot_id, step, f"{step:08x}", rank, world_size, step, 0, 1)
    return replace(found, **changes)


@pytest.fixture
def table() -> SlotTable:
    """Two workers with two slots each."""
    table = SlotTable(SlotLimits(10 * GIB, 8 * GIB, 100, 100))
    table.add([record("a1"), record("a2"), record("b1", "b"), record("b2", "b")])
    return table


def ids(records: Any) -> set[str]:
    return {record.slot_id for record in records}


def test_slots_beyond_a_limit_are_refused(table: SlotTable) -> None:
    table.require_room(TEAM, 2 * GIB)
    with pytest.raises(RequestRefused, match=r"team \(job run\) uses"):
        table.require_room(TEAM, 3 * GIB)
    table.require_room(OTHER, 3 * GIB)
    with pytest.raises(RequestRefused) as refused:
        table.require_room(OTHER, 4 * GIB)
    assert refused.value.code == "slots_full"
    assert "slot_bytes_max" in refused.value.fix
    table.remove(["a1", "a2", "unknown"])
    table.require_room(OTHER, 4 * GIB)


def test_load_counts_what_is_stored(table: SlotTable) -> None:
    again = SlotTable(SlotLimits(4 * GIB, 4 * GIB, 100, 100))
    again.load(table.records.values())
    assert again.shares.used == table.shares.used == 4 * GIB
    with pytest.raises(RequestRefused, match="two slots of"):
        again.require_room(OTHER, GIB)
    again.set_limits(SlotLimits(8 * GIB, 8 * GIB, 5, 5))
    with pytest.raises(RequestRefused, match="two more slots"):
        again.require_room(OTHER, GIB)


@pytest.mark.parametrize(
    ("slots_max", "of_principal_max", "field"), [(5, 100, "slots_max"), (8, 5, "principal_slots_max")]
)
def test_slots_beyond_their_number_are_refused(
    table: SlotTable, slots_max: int, of_principal_max: int, field: str
) -> None:
    table.set_limits(SlotLimits(10 * GIB, 8 * GIB, slots_max, of_principal_max))
    with pytest.raises(RequestRefused, match="two more slots do not fit") as refused:
        table.require_room(TEAM, 4096)
    assert refused.value.code == "slots_full"
    assert refused.value.fix.startswith(f"raise {field};")
    table.remove(["a1"])
    table.require_room(TEAM, 4096)


def test_worker_that_opens_slots_faster_than_they_are_freed_is_refused(table: SlotTable) -> None:
    for number in range(2, WORKER_SLOTS_MAX // 2 + 1):
        table.require_few("run", "a", b"a")
        table.add([record(f"a{number}{place}", at=float(number)) for place in "xy"])
    with pytest.raises(RequestRefused, match="worker a of job run has 8 slots; limit 8"):
        table.require_few("run", "a", b"a")
    table.require_few("run", "b", b"b")


def test_newest_complete_save_comes_first() -> None:
    found = staged_checkpoints(
        [
            contents("a1", 5),
            contents("b1", 5, 1),
            contents("a2", 6),
            contents("b2", 4, 1),
            contents("c1", 2, world_size=1, generation=2),
        ]
    )
    assert [(one.step, one.slot_ids) for one in found] == [(2, ("c1",)), (5, ("a1", "b1"))]


def test_slots_of_present_workers_stay(table: SlotTable) -> None:
    assert ids(table.superseded("run", [], None, 0.0)) == set()
    assert table.jobs_to_look_after() == set()
    table.add([record("a3", at=2.0), record("a4", at=2.0)])
    assert table.jobs_to_look_after() == {"run"}
    assert ids(table.superseded("run", [], None, 0.0)) == {"a1", "a2"}


def test_last_save_of_a_failed_worker_stays_until_it_is_superseded(table: SlotTable) -> None:
    changed = table.end("run", SlotOwner.FAILED, 9.0, 7, lambda record: record.worker_id == "b")
    assert ids(changed) == {"b1", "b2"}
    assert {one.cause for one in changed} == {7}
    staged = [contents("a1", 5), contents("b1", 5, 1), contents("a2", 4), contents("b2", 4, 1)]
    assert ids(table.superseded("run", staged, None, 99.0)) == {"b2"}
    assert ids(table.superseded("run", staged, 4, 99.0)) == {"b2"}
    assert ids(table.superseded("run", staged, 5, 99.0)) == {"b1", "b2"}
    newer = [*staged, contents("a2", 6, world_size=1, generation=2)]
    assert ids(table.superseded("run", newer, None, 99.0)) == {"b1", "b2"}


def test_slots_of_workers_that_have_left_stay_for_a_while(table: SlotTable) -> None:
    staged = [contents("a1", 5), contents("b1", 5, 1)]
    table.end("run", SlotOwner.LEFT, 100.0, 7, lambda record: True)
    assert ids(table.superseded("run", staged, None, 100.0 + LEFT_S - 1)) == {"a2", "b2"}
    assert ids(table.superseded("run", staged, None, 100.0 + LEFT_S)) == {"a1", "a2", "b1", "b2"}


def test_end_is_recorded_once(table: SlotTable) -> None:
    table.end("run", SlotOwner.FAILED, 9.0, 7, lambda record: True)
    assert table.end("run", SlotOwner.LEFT, 10.0, 8, lambda record: True) == []
    assert {one.owner for one in table.of_job("run")} == {SlotOwner.FAILED}
