from __future__ import annotations

import math
import tracemalloc
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.permutation import PIECE, PIECE_OF_EACH, Permutation, permute_each
from forged.errors import RequestRefused
from tests.data.topology_changes import UNTIMED

DEVIATIONS_MAX = 5.0
"""Of a chi-square from what it is for chance, in standard deviations. Everything here is the same in every run."""
LARGE = [4097, 10**6, 10**9, 10**12, 2**40, 2**62]


def deviation(counts: npt.NDArray[Any]) -> float:
    """How far counts that ought to be equal are from it."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def binned(values: npt.NDArray[Any], size: int, bins: int = 64) -> npt.NDArray[Any]:
    return np.bincount((values / size * bins).astype(np.int64).clip(0, bins - 1), minlength=bins)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 8, 9, 255, 256, 257, 1000, 4095, 4096, 4097, PIECE + 1, 100_000])
def test_each_number_is_there_once(size: int) -> None:
    assert np.array_equal(np.sort(Permutation(size, 7, 1).span(0, size)), np.arange(size))


@UNTIMED
@given(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_each_number_is_there_once_for_every_key(size: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(size, seed, epoch).span(0, size)) == list(range(size))


@pytest.mark.parametrize(
    ("size", "key", "start", "found"),
    [
        (1, (0,), 0, [0]),
        (4, (0,), 0, [0, 1, 3, 2]),
        (10, (0,), 0, [8, 2, 3, 5, 6, 9, 1, 4, 0, 7]),
        (10, (0, 0), 0, [6, 7, 1, 4, 2, 5, 3, 9, 0, 8]),
        (10, (7, 3), 0, [5, 2, 9, 0, 4, 7, 1, 3, 6, 8]),
        (4096, (1, 2, 3), 100, [1242, 48, 126, 2406, 2156]),
        (65537, (1,), 0, [43546, 32396, 56994, 50308, 25818]),
        (1000000, (42, 0), 0, [797441, 476280, 500931, 701949, 976414, 361387]),
        (1000000000000, (42, 0), 0, [662477317376, 549385041435, 951676674140, 646727109476, 481709874965]),
        (1000000000000, (42, 1), 999999999996, [450368698861, 433824804589, 615279615965, 143997759685]),
        (
            9223372036854775808,
            (18446744073709551615,),
            9223372036854775805,
            [7627565166426773538, 649554408561285792, 6995215760940016979],
        ),
    ],
)
def test_the_same_numbers_on_every_machine(size: int, key: tuple[int, ...], start: int, found: list[int]) -> None:
    assert Permutation(size, *key).span(start, start + len(found)).tolist() == found


def in_plain_numbers(size: int, index: int, *key: int) -> int:
    """The same with numbers that never overflow."""

    def mixed(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    gamma, bits, state = 0x9E3779B97F4A7C15, max(1, (size - 1).bit_length()), 0
    for word in (size, *key):
        state = mixed(((state ^ word) + gamma) % 2**64)
    rounds = 20 if bits <= 12 else 6
    numbers = [mixed((state + step * gamma) % 2**64) >> (64 - bits) for step in range(1, 2 * rounds + 1)]
    while True:
        for factor, addend in zip(numbers[:rounds], numbers[rounds:], strict=True):
            index = (index * (factor | 1) + addend) % 2**bits
            index ^= index >> ((bits + 1) // 2)
        if index < size:
            return index


@UNTIMED
@given(st.integers(1, 2**63), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.data())
def test_permutation_equals_its_definition_in_plain_integers(
    size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, size - 1))
    assert Permutation(size, seed, epoch).at([index]).tolist() == [in_plain_numbers(size, index, seed, epoch)]


@UNTIMED
@given(st.integers(1, 2**63), st.integers(0, 2**64 - 1), st.data())
def test_distinct_indices_have_distinct_values(size: int, seed: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), max_size=20, unique=True))
    permutation = Permutation(size, seed)
    values = permutation.at(indices)
    assert all(0 <= value < size for value in values.tolist())
    assert len(set(values.tolist())) == len(indices)


@UNTIMED
@given(st.integers(1, 2**63), st.integers(0, 2**64 - 1), st.data())
def test_span_equals_the_values_at_its_indices(size: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start, min(size, start + 50)))
    permutation = Permutation(size, seed)
    assert np.array_equal(permutation.span(start, stop), permutation.at(np.arange(start, stop, dtype=np.uint64)))


def test_pieces_meet_without_a_seam() -> None:
    permutation = Permutation(10**12, 3)
    whole = permutation.span(5, 5 + 2 * PIECE + 7)
    assert np.array_equal(whole[PIECE - 3 : PIECE + 3], permutation.span(5 + PIECE - 3, 5 + PIECE + 3))
    assert len(np.unique(whole)) == len(whole)


def test_the_largest_size_ends_where_int64_does() -> None:
    permutation = Permutation(2**63, 1)
    last = permutation.span(2**63 - 3, 2**63)
    assert last.dtype == np.int64
    assert (last >= 0).all()
    assert len(np.unique(last)) == 3


@pytest.mark.parametrize("size", [1, 5, 100, 4096, 10**9])
def test_many_permutations_at_once_are_the_same_as_one_by_one(size: int) -> None:
    count = 2 * PIECE_OF_EACH + 3
    shards = np.arange(count, dtype=np.uint64) % np.uint64(20)
    indices = np.arange(count) * 7 % size
    found = permute_each(size, indices, 3, 9, shards)
    for shard in range(20):
        chosen = shards == shard
        assert np.array_equal(found[chosen], Permutation(size, 3, 9, shard).at(indices[chosen]))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_all_orders_of_a_few_are_equally_likely(size: int) -> None:
    orders = {order: number for number, order in enumerate(permutations(range(size)))}
    seeds = np.arange(len(orders) * 60, dtype=np.uint64)
    places = np.array([permute_each(size, np.full(len(seeds), at), seeds) for at in range(size)])
    codes = (places * (size ** np.arange(size))[:, None]).sum(axis=0)
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == len(orders)
    assert deviation(counts) < DEVIATIONS_MAX


@pytest.mark.parametrize("size", [16, 37, 100])
def test_where_two_of_a_few_stand_is_independent(size: int) -> None:
    seeds = np.arange(size * size * 20, dtype=np.uint64)
    for first, second in ((0, 1), (size - 2, size - 1), (0, size // 2)):
        pairs = [permute_each(size, np.full(len(seeds), at), seeds) for at in (first, second)]
        counts = np.bincount(pairs[0] * size + pairs[1], minlength=size * size).reshape(size, size)
        assert not counts.diagonal().any()
        assert deviation(counts[~np.eye(size, dtype=bool)]) < DEVIATIONS_MAX


@pytest.mark.parametrize("size", LARGE)
def test_neighbours_stand_anywhere(size: int) -> None:
    """The first of an epoch, how far they are apart, and their lowest bits: all are as chance would have them."""
    for seed in range(10):
        values = Permutation(size, seed).span(0, min(size // 4 * 3, 50_000))
        assert deviation(binned(values, size)) < DEVIATIONS_MAX
        for lag in (1, 2, 3, 16, 1024):
            apart = (values[lag:] - values[:-lag]) % size
            assert deviation(binned(apart, size)) < DEVIATIONS_MAX
            assert deviation(np.bincount((values[lag:] ^ values[:-lag]) & 63, minlength=64)) < DEVIATIONS_MAX
            sixteenths = (values / size * 16).astype(np.int64)
            pairs = sixteenths[lag:] * 16 + sixteenths[:-lag]
            assert deviation(np.bincount(pairs, minlength=256)) < DEVIATIONS_MAX


@pytest.mark.parametrize("size", LARGE)
def test_epochs_and_seeds_have_nothing_in_common(size: int) -> None:
    count = min(size, 50_000)
    one = Permutation(size, 1, 1).span(0, count)
    for key in ((1, 2), (2, 1), (1,), (1, 1, 0), (0, 1), (2**63 + 1, 1)):
        other = Permutation(size, *key).span(0, count)
        assert deviation(binned((other - one) % size, size)) < DEVIATIONS_MAX
        # Two orders have one place in common, on the average.
        assert (one == other).sum() < 10


def test_memory_does_not_grow_with_the_size() -> None:
    def peak_bytes(size: int) -> int:
        tracemalloc.start()
        try:
            Permutation(size, 1).span(0, 10**6)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes(2**62) < 1.2 * peak_bytes(2**20)


@pytest.mark.parametrize("size", [-1, 2**63 + 1, 1.0, "1", None, True])
def test_invalid_size_is_refused(size: Any) -> None:
    with pytest.raises(RequestRefused, match="size") as caught:
        Permutation(size, 1)
    assert caught.value.code == "permutation_invalid"


@pytest.mark.parametrize("word", [-1, 2**64, 1.0, "1", None, True])
def test_invalid_key_is_refused(word: Any) -> None:
    with pytest.raises(RequestRefused, match="key"):
        Permutation(10, 1, word)


@pytest.mark.parametrize("indices", [[10], [-1], [0.5], ["0"], [[1]], [True], 2**70, 3])
def test_invalid_index_is_refused(indices: Any) -> None:
    permutation = Permutation(10, 1)
    with pytest.raises(RequestRefused, match="from 0 to 9"):
        permutation.at(indices)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 11)])
def test_invalid_span_is_refused(start: int, stop: int) -> None:
    with pytest.raises(RequestRefused, match="from 0 to 9"):
        Permutation(10, 1).span(start, stop)


def test_a_permutation_of_nothing_has_nothing_at_any_index() -> None:
    assert Permutation(0, 1).span(0, 0).size == 0
    assert Permutation(0, 1).at([]).size == 0
    with pytest.raises(RequestRefused, match="an empty permutation has no index"):
        Permutation(0, 1).at([0])
