from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from forged.data.columns import NOBODY
from forged.data.messages import DatasetSpec
from forged.data.ownership import records
from forged.data.ownership.attempt import Assignment
from forged.data.ownership.records import (
    dataset_write,
    holders_write,
    job_of,
    keys_of,
    piece_writes,
    restored,
    suspect_writes,
)
from forged.elastic.model import WorkerId
from forged.errors import PeerError

JOB = "run"
DATASET = DatasetSpec(100, 10, 1)


def assignment(generation: int, *, workers: int = 3, shards: int = 10, copies: int = 1) -> Assignment:
    ids = tuple(WorkerId(f"w{number}", "host", 7000 + number) for number in range(workers))
    rows = [(np.arange(shards) + row) % workers for row in range(1 + copies)]
    rows[0] = np.where(np.arange(shards) == 3, NOBODY, rows[0])
    columns = np.array(rows, np.int32).reshape(1 + copies, shards)
    return Assignment(generation, ids, columns[0], columns[1:])


def written(attempt: int, held: Assignment) -> dict[str, bytes]:
    """What the store holds of it."""
    entries = dict(piece_writes(JOB, attempt, held))
    return entries | {key: value for key, value in holders_write(JOB, attempt, held).items() if value is not None}


def defined() -> dict[str, bytes]:
    return {key: value for key, value in dataset_write(JOB, DATASET).items() if value is not None}


def same(one: Assignment, other: Assignment) -> bool:
    return (
        (one.generation, one.workers) == (other.generation, other.workers)
        and np.array_equal(one.owners, other.owners)
        and np.array_equal(one.replicas, other.replicas)
        and one.owners.dtype == other.owners.dtype == np.int32
    )


@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize("piece_shards", [1, 3, 10, 11])
def test_held_assignment_is_restored(copies: int, piece_shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PIECE_SHARDS", piece_shards)
    held = assignment(4, copies=copies)
    found = restored(JOB, (defined() | written(7, held)).items())
    assert found is not None
    assert same(found.ownership.assignment, held)
    assert (found.attempt, found.planned, found.unused, found.ownership.dataset) == (7, {}, [], DATASET)


def test_many_workers_need_wider_pieces_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "WORKERS_NARROW_MAX", 3)
    held = assignment(4)
    assert {len(piece) for _, piece in piece_writes(JOB, 7, held)} == {40}
    found = restored(JOB, (defined() | written(7, held)).items())
    assert found is not None
    assert same(found.ownership.assignment, held)


def test_a_dataset_without_shards_comes_back() -> None:
    held = assignment(4, shards=0)
    found = restored(JOB, (defined() | written(7, held)).items())
    assert found is not None
    assert same(found.ownership.assignment, held)


def test_planned_assignment_is_restored_apart_from_the_held_one() -> None:
    held, planned = assignment(4), assignment(0, workers=2)
    found = restored(JOB, (defined() | written(7, held) | written(9, planned)).items())
    assert found is not None
    assert same(found.ownership.assignment, held)
    assert list(found.planned) == [9]
    assert same(found.planned[9], planned)
    assert found.unused == []


def test_newest_committed_assignment_is_restored_and_older_keys_are_unused() -> None:
    found = restored(JOB, (defined() | written(7, assignment(4)) | written(8, assignment(5, workers=2))).items())
    assert found is not None
    assert (found.attempt, found.ownership.assignment.generation) == (8, 5)
    assert sorted(found.unused) == sorted(written(7, assignment(4)))


def test_pieces_that_nothing_names_remain() -> None:
    stray = {f"data/{JOB}/piece/3/{row}/0": b"" for row in range(2)} | {f"data/{JOB}/what": b""}
    found = restored(JOB, (defined() | written(7, assignment(4)) | stray).items())
    assert found is not None
    assert sorted(found.unused) == sorted(stray)


def test_of_a_job_that_is_no_more_nothing_comes_back() -> None:
    assert restored(JOB, written(7, assignment(4)).items()) is None


def test_no_shard_is_held_before_the_first_plan() -> None:
    found = restored(JOB, defined().items())
    assert found is not None
    assert (found.attempt, found.planned, found.ownership.assignment.workers) == (0, {}, ())
    assert found.ownership.assignment.owners.tolist() == [NOBODY] * 10


@pytest.mark.parametrize("shards", [0, 1, 9, 10])
def test_keys_of_an_assignment_start_with_the_record_that_names_the_pieces(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "PIECE_SHARDS", 3)
    held = assignment(4, shards=shards)
    keys = keys_of(JOB, 7, shards, 2)
    assert set(keys) == set(written(7, held))
    assert keys[0] in holders_write(JOB, 7, held)
    assert {job_of(key) for key in keys} == {JOB}


def test_weights_come_back() -> None:
    held = assignment(4)
    held = replace(held, weights={held.workers[1]: 0.1, held.workers[2]: 1e300})
    found = restored(JOB, (defined() | written(7, held)).items())
    assert found is not None
    weights = found.ownership.assignment.weights
    assert [weights.get(worker, 1.0) for worker in held.workers] == [1.0, 0.1, 1e300]


def test_record_without_weights_is_restored_without_weights() -> None:
    held = assignment(4)
    entries = written(7, held)
    key = f"data/{JOB}/holders/7"
    record = msgspec.msgpack.decode(entries[key])
    assert record.pop("weights") == []
    found = restored(JOB, (defined() | entries | {key: msgspec.msgpack.encode(record)}).items())
    assert found is not None
    assert found.ownership.assignment.weights == {}


def test_copies_that_are_in_doubt_come_back() -> None:
    writes = suspect_writes(JOB, {("a", 3): True, ("a.b-1", 9): True, ("c", 0): False})
    assert [key for key, value in writes.items() if value is None] == [f"data/{JOB}/suspect/c/0"]
    kept = {key: value for key, value in writes.items() if value is not None}
    found = restored(JOB, (defined() | kept).items())
    assert found is not None
    doubts = found.ownership.suspects
    assert [doubts.held_by(name, np.arange(10)).tolist() for name in ("a", "a.b-1", "c")] == [[3], [9], []]
    assert found.unused == []


@pytest.mark.parametrize(
    "broken",
    [
        {"data/run/dataset": b"\xc1"},
        {"data/run/holders/4": b"\xc1"},
        {"data/run/piece/4/1/0": b""},
        {"data/run/piece/4/1/0": bytes(18)},
        {"data/run/piece/4/0/0": np.full(10, 3, "<i2").tobytes()},
        {"data/run/piece/4/0/0": np.full(10, -2, "<i2").tobytes()},
        {"data/run/suspect/a/x": b""},
    ],
)
def test_incomplete_assignment_records_are_unreadable(broken: dict[str, bytes]) -> None:
    entries = defined() | written(4, assignment(2))
    assert broken.keys() <= entries.keys() or "suspect" in str(broken)
    assert restored(JOB, entries.items()) is not None
    with pytest.raises(PeerError) as error:
        restored(JOB, (entries | broken).items())
    assert error.value.code == "data_unreadable"


def test_a_piece_that_is_missing_is_an_error() -> None:
    entries = defined() | written(4, assignment(2))
    del entries["data/run/piece/4/1/0"]
    with pytest.raises(PeerError):
        restored(JOB, entries.items())


def test_suspect_outside_the_dataset_is_unused() -> None:
    writes = suspect_writes(JOB, {("a", 10): True})
    found = restored(JOB, (defined() | dict.fromkeys(writes, b"")).items())
    assert found is not None
    assert found.unused == list(writes)
    assert found.ownership.suspects.held_by("a", np.arange(20)).tolist() == []
