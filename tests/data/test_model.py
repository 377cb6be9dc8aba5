"""Datasets, shards and transfers as values."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data import Dataset, DataShard, DataTransfer, SourceKind, TransferPace
from forged.data.model import SAMPLES_MAX, SHARDS_DEFAULT_MAX, SHARDS_MAX
from forged.errors import RequestRefused
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


def test_transfer_has_source_destination_shard_and_priority() -> None:
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


@st.composite
def datasets(draw: st.DrawFn) -> Dataset:
    samples = draw(st.integers(1, 500))
    return Dataset(samples, draw(st.integers(1, samples)))


@given(datasets())
def test_the_shards_are_disjoint_and_cover_every_sample(dataset: Dataset) -> None:
    shards = [dataset.shard(number) for number in range(dataset.shards)]
    assert shards[0].start_index == 0
    assert shards[-1].end_index == dataset.samples
    assert all(one.end_index == following.start_index for one, following in pairwise(shards))


@given(datasets())
def test_sizes_differ_by_at_most_one_and_the_earlier_are_the_larger(dataset: Dataset) -> None:
    sizes = [dataset.shard(number).size for number in range(dataset.shards)]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert sizes == sorted(sizes, reverse=True)


@given(datasets())
def test_shard_columns_equal_the_single_shards(dataset: Dataset) -> None:
    ids = np.arange(dataset.shards)[::-1]
    starts, ends = dataset.bounds(ids)
    shards = [dataset.shard(number) for number in ids]
    assert starts.tolist() == [shard.start_index for shard in shards]
    assert ends.tolist() == [shard.end_index for shard in shards]
    assert dataset.sizes(ids).tolist() == [shard.size for shard in shards]


@given(datasets())
def test_every_sample_is_in_the_shard_that_holds_it(dataset: Dataset) -> None:
    samples = np.arange(dataset.samples)
    found = dataset.shard_of(samples)
    starts, ends = dataset.bounds(found)
    assert ((starts <= samples) & (samples < ends)).all()


def test_without_a_number_of_shards_there_is_one_for_each_sample() -> None:
    assert Dataset.of(7) == Dataset(7, 7)
    assert [Dataset.of(3).shard(number).size for number in range(3)] == [1, 1, 1]


def test_two_billion_samples_are_no_two_billion_shards() -> None:
    dataset = Dataset.of(2_000_000_000)
    assert dataset.shards == SHARDS_DEFAULT_MAX
    assert dataset.shard(dataset.shards - 1).end_index == 2_000_000_000
    assert dataset.shard_of([1_999_999_999]).tolist() == [dataset.shards - 1]


def test_no_number_is_too_large_for_its_column() -> None:
    dataset = Dataset(SAMPLES_MAX, SHARDS_MAX)
    starts, ends = dataset.bounds([0, SHARDS_MAX - 1])
    assert (int(starts[0]), int(ends[-1])) == (0, SAMPLES_MAX)
    assert dataset.shard_of([SAMPLES_MAX - 1]).tolist() == [SHARDS_MAX - 1]
    assert dataset.shard(SHARDS_MAX - 1).end_index == SAMPLES_MAX


def test_a_dataset_of_nothing_has_no_shards() -> None:
    assert Dataset.of(0) == Dataset(0, 0)
    starts, ends = Dataset.of(0).bounds([])
    assert (starts.size, ends.size, Dataset.of(0).sizes([]).size, Dataset.of(0).shard_of([]).size) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("samples", "shards", "field"),
    [
        (-1, None, "total_dataset_size"),
        (SAMPLES_MAX + 1, None, "total_dataset_size"),
        pytest.param(10**5000, None, "total_dataset_size", id="no text"),
        (True, None, "total_dataset_size"),
        (3.0, None, "total_dataset_size"),
        ("3", None, "total_dataset_size"),
        (3, 4, "shards"),
        (3, 0, "shards"),
        (3, -1, "shards"),
        (0, 1, "shards"),
        (3, 1.0, "shards"),
        (2**40, SHARDS_MAX + 1, "shards"),
    ],
)
def test_invalid_size_is_refused_by_name(samples: Any, shards: Any, field: str) -> None:
    with pytest.raises(RequestRefused, match=field) as caught:
        Dataset.of(samples, shards)
    assert caught.value.code == "dataset_invalid"
    assert "must be a whole number from" in caught.value.message
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("ids", [[5], [-1], [0.5], ["0"], [True]])
def test_bounds_of_an_invalid_shard_raise(ids: Any) -> None:
    with pytest.raises(IndexError):
        Dataset(10, 5).bounds(ids)


@pytest.mark.parametrize("number", [-1, 5])
def test_a_shard_that_is_not_there_is_not_made_up(number: int) -> None:
    with pytest.raises(IndexError):
        Dataset(10, 5).shard(number)
