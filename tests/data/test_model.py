"""Shards and transfers: frozen, the same after every journey."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

from forged.data import DataShard, DataTransfer, SourceKind, TransferPace
from tests.data.topology_changes import at

SHARD = DataShard(3, 30, 40)
EVERY_VALUE = [
    SHARD,
    DataTransfer(at(1, 1), at(2, 2), SHARD, 7, 12.5, SourceKind.REPLICA),
    DataTransfer(None, at(2, 2), SHARD, 7, source_kind=SourceKind.ORIGIN),
    TransferPace(1e9, 4.0, 100.0),
]


def test_a_shard_is_a_number_and_a_range_of_samples() -> None:
    assert (SHARD.shard_id, SHARD.start_index, SHARD.end_index, SHARD.size) == (3, 30, 40, 10)


def test_a_shard_cannot_end_before_it_starts() -> None:
    assert DataShard(0, 5, 5).size == 0
    with pytest.raises(ValueError, match="end_index must be >= start_index"):
        DataShard(0, 5, 4)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"shard_id": 0, "start_index": 5, "end_index": 4}, DataShard)


def test_a_transfer_says_from_whom_to_whom_which_shard_and_how_urgent() -> None:
    transfer = DataTransfer(at(1, 1), at(2, 2), SHARD, 7)
    assert (transfer.source_worker, transfer.destination_worker) == (at(1, 1), at(2, 2))
    assert (transfer.shard, transfer.priority) == (SHARD, 7)
    assert (transfer.estimated_completion_time, transfer.source_kind) == (None, SourceKind.OWNER)


@pytest.mark.parametrize("value", EVERY_VALUE, ids=lambda value: type(value).__name__)
def test_every_value_is_frozen(value: Any) -> None:
    for field in value.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(value, field, getattr(value, field))


@pytest.mark.parametrize("value", EVERY_VALUE, ids=lambda value: type(value).__name__)
def test_every_value_is_the_same_after_a_journey(value: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize(
    ("rate", "size"),
    [(0.0, 1.0), (-1.0, 1.0), (float("inf"), 1.0), (float("nan"), 1.0), (1.0, -1.0), (1.0, float("nan"))],
)
def test_impossible_pace_is_refused(rate: float, size: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_second must be finite"):
        TransferPace(rate, size)


def test_the_kinds_of_source_are_those_of_the_page() -> None:
    assert list(SourceKind) == ["owner", "replica", "origin"]
