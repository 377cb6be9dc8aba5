from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.model import CompressionLevel, PerRank, ShardedArray
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.verification.difference import Amount, Difference, DifferenceKind, Side, differences
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_writer import write_checkpoint

Array = np.ndarray[Any, Any]
NAN, INF = math.nan, math.inf


def side(*states: Any, level: CompressionLevel = CompressionLevel.NONE) -> Side:
    """A checkpoint in a new storage."""
    storage = MemoryStorage()
    return Side(storage, write_checkpoint(storage, "a", states, level=level))


def read(one: Side) -> int:
    storage = one.storage
    assert isinstance(storage, MemoryStorage)
    return storage.bytes_read


def between(a: Side, b: Side) -> dict[str, Difference]:
    found = list(differences(a, b, CancelToken()))
    assert len({(one.name, one.rank) for one in found}) == len(found)
    return {one.name if one.rank is None else f"{one.name}@{one.rank}": one for one in found}


def amount(a: Array, b: Array) -> Amount:
    """How much two arrays differ."""
    (found,) = between(side({"x": a}), side({"x": b})).values()
    assert found.kind is (DifferenceKind.CHANGED if found.amount.differing else DifferenceKind.SAME)
    return found.amount


def test_all_tensors_are_compared_in_order() -> None:
    a = side(
        {"left": np.zeros(2), "same": np.arange(3), "moved": np.zeros(4), "shape": np.zeros(2), "type": np.zeros(2)}
    )
    b = side(
        {
            "same": np.arange(3),
            "right": np.zeros((2, 5)),
            "moved": np.ones(4),
            "shape": np.zeros(3),
            "type": np.zeros(2, np.int64),
        }
    )
    found = between(a, b)
    assert [(name, one.kind) for name, one in found.items()] == [
        ("left", DifferenceKind.ONLY_IN_A),
        ("same", DifferenceKind.SAME),
        ("moved", DifferenceKind.CHANGED),
        ("shape", DifferenceKind.INCOMPATIBLE),
        ("type", DifferenceKind.INCOMPATIBLE),
        ("right", DifferenceKind.ONLY_IN_B),
    ]
    assert (found["type"].a, found["type"].b) == (("float64", (2,)), ("int64", (2,)))
    assert (found["left"].b, found["right"].a, found["right"].elements) == (None, None, 10)


def test_equal_chunks_are_not_read() -> None:
    state = {"x": np.arange(200_000.0), "y": np.ones(5)}
    a, b = side(state), side(state, level=CompressionLevel.FAST)
    assert {one.kind for one in between(a, b).values()} == {DifferenceKind.SAME}
    assert read(a) == read(b) == 0


def test_only_differing_chunks_of_a_large_tensor_are_read() -> None:
    x = np.arange(200_000.0)
    y = x.copy()
    y[70_000] += 0.5
    a, b = side({"x": x}), side({"x": y})
    assert between(a, b)["x"].amount == Amount(1, 0.5, 0.5, 0)
    assert read(a) == read(b) == 1 << 17


def test_sharded_and_whole_tensors_are_compared() -> None:
    x = np.arange(400_000.0, dtype=np.float32).reshape(1000, 400)
    y = x.copy()
    y[::100, 7] -= 2
    columns = [{"x": ShardedArray(x[:, low:high], x.shape, (0, low))} for low, high in ((0, 150), (150, 400))]
    assert between(side(*columns), side({"x": x}))["x"].kind is DifferenceKind.SAME
    assert between(side(*columns), side({"x": y}))["x"].amount == Amount(10, 2, math.sqrt(40), 0)
    a, b = side(*columns), side(*columns)
    assert between(a, b)["x"].kind is DifferenceKind.SAME
    assert read(a) == read(b) == 0


def test_per_rank_tensors_are_compared_by_rank() -> None:
    a = side({"r": PerRank(np.array([1]))}, {"r": PerRank(np.array([2]))})
    b = side({"r": PerRank(np.array([1]))}, {"r": PerRank(np.array([3]))}, {"r": PerRank(np.array([4]))})
    assert {name: one.kind for name, one in between(a, b).items()} == {
        "r@0": DifferenceKind.SAME,
        "r@1": DifferenceKind.CHANGED,
        "r@2": DifferenceKind.ONLY_IN_B,
    }


FLOATS = [np.float16, np.float32, np.float64, np.longdouble, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ">f4"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_counted_separately(dtype: Any) -> None:
    a = np.array([1, NAN, NAN, INF, 2, 0, INF], dtype)
    b = np.array([1, NAN, 3, INF, NAN, 4, INF], dtype)
    assert amount(a, b) == Amount(3, 4, 4, 2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_distance_to_infinity_is_infinite(dtype: Any) -> None:
    found = amount(np.array([INF, 1, -INF], dtype), np.array([1, 1, INF], dtype))
    assert found == Amount(2, INF, INF, 0)


def test_different_bits_of_equal_numbers_have_no_distance() -> None:
    found = amount(np.array([0.0, 1.0]), np.array([-0.0, 1.0]))
    assert found == Amount(1, 0.0, 0.0, 0)
    quiet, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert amount(np.array([quiet]), np.array([other])) == Amount(1, 0.0, 0.0, 0)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_integer_distances_do_not_overflow(dtype: Any) -> None:
    limits = np.iinfo(dtype)
    a, b = np.array([limits.min, limits.max, 5], dtype), np.array([limits.max, limits.min, 5], dtype)
    span = float(int(limits.max) - int(limits.min))
    found = amount(a, b)
    assert (found.differing, found.max_abs, found.nan_on_one_side) == (2, span, 0)
    assert found.norm == pytest.approx(math.sqrt(2) * span)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (np.array([True, False]), np.array([True, True]), Amount(1, 1, 1, 0)),
        (np.array([1 + 1j, 2]), np.array([4 + 5j, 2]), Amount(1, 5, 5, 0)),
        (np.array([1 + 1j], np.complex64), np.array([complex(NAN, 1)], np.complex64), Amount(1, 0, 0, 1)),
        (np.array(["a", "b"]), np.array(["a", "c"]), Amount(1, None, None, 0)),
        (np.array([b"abc"]), np.array([b"abd"]), Amount(1, None, None, 0)),
        (np.array([1, 2], ml_dtypes.int4), np.array([-7, 2], ml_dtypes.int4), Amount(1, 8, 8, 0)),
        (np.array([5], "m8[s]"), np.array([9], "m8[s]"), Amount(1, 4, 4, 0)),
        (np.array(3.0), np.array(5.0), Amount(1, 2, 2, 0)),
        (np.array(3.0), np.array(3.0), Amount(0, None, None, 0)),
        (np.empty((0, 3)), np.empty((0, 3)), Amount(0, None, None, 0)),
    ],
)
def test_amounts_of_examples(a: Array, b: Array, expected: Amount) -> None:
    assert amount(a, b) == expected


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 90_000), st.integers(1, 3), st.floats(0, 1))
def test_amounts_equal_numpys_over_the_whole_tensor(seed: int, rows: int, columns: int, share: float) -> None:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, columns)).astype(np.float32)
    y = np.where(draw.random(x.shape) < share, x, x + draw.standard_normal(x.shape).astype(np.float32))
    found = amount(x, y)
    distances = np.abs(x.astype(np.float64) - y)
    assert found.differing == np.count_nonzero(x != y)
    assert (found.max_abs or 0.0) == distances.max()
    assert (found.norm or 0.0) == pytest.approx(np.linalg.norm(distances))


def test_corruption_is_an_error_and_not_a_difference() -> None:
    a, b = side({"x": np.zeros(10)}), side({"x": np.ones(10)})
    storage, part = b.storage, b.manifest.parts[0]
    assert isinstance(storage, MemoryStorage)
    storage.damage(part.file, part.data_offset + 3)
    with pytest.raises(CheckpointException) as caught:
        between(a, b)
    assert caught.value.code == "checkpoint_chunk_corrupt"


def test_cancellation_stops_the_comparison() -> None:
    token = CancelToken()
    token.cancel()
    one = side({"x": np.zeros(10)})
    with pytest.raises(CheckpointException) as caught:
        list(differences(one, one, token))
    assert caught.value.code == "checkpoint_cancelled"


def test_unwanted_names_are_not_read_or_reported() -> None:
    a, b = side({"w": np.zeros(3), "v": np.zeros(3)}), side({"w": np.ones(3), "u": np.zeros(3)})
    found = list(differences(a, b, CancelToken(), {"v", "u"}.__contains__))
    assert [(one.name, one.kind) for one in found] == [("v", DifferenceKind.ONLY_IN_A), ("u", DifferenceKind.ONLY_IN_B)]
    assert read(a) == read(b) == 0
