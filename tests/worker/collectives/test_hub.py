from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import ForgedError, PeerError, RequestRefused
from forged.worker.collectives.hub import NAMES_MAX, REDUCED_BYTES_MAX, Collected, Hub
from forged.worker.transport.peer_messages import (
    COLLECTIVE_BYTES_MAX,
    CollectiveCall,
    Contribution,
    Form,
    Kind,
    Operation,
    Value,
)

BARRIER = CollectiveCall(Kind.BARRIER)


def hub(size: int = 3) -> Hub:
    return Hub([f"w{rank}" for rank in range(size)])


def value(data: bytes = b"x") -> Value:
    return Value(Form.BYTES, memoryview(data))


def collect(one: Hub, *contributions: Contribution) -> Collected:
    """What comes of it when every rank brings one of these."""
    *early, last = (one.take(rank, contribution) for rank, contribution in enumerate(contributions))
    assert early == [None] * len(early)
    assert last is not None
    return last


def error_of(one: Hub, rank: int, contribution: Contribution) -> ForgedError:
    with pytest.raises(ForgedError) as raised:
        one.take(rank, contribution)
    return raised.value


@given(st.permutations(range(5)), st.integers(1, 4))
def test_a_collective_is_complete_when_every_rank_has_called_it_in_any_order(order: list[int], rounds: int) -> None:
    one = hub(5)
    for number in range(1, rounds + 1):
        call = CollectiveCall(Kind.ALL_GATHER)
        outcomes = [one.take(rank, Contribution(number, call, value(b"%d" % rank))) for rank in order]
        assert outcomes[:-1] == [None] * 4
        collected = outcomes[-1]
        assert collected is not None
        assert [bytes(one.data) for one in collected.brought] == [b"0", b"1", b"2", b"3", b"4"]
        assert not one.is_waiting


def test_mismatched_calls_are_named_with_their_ranks() -> None:
    one = hub()
    one.take(2, Contribution(1, CollectiveCall(Kind.END_STEP, step=7)))
    error = error_of(one, 0, Contribution(1, CollectiveCall(Kind.END_STEP, step=8)))
    assert isinstance(error, RequestRefused)
    assert error.code == "collective_mismatch"
    for said in ("#1", "w2 (rank 2)", "step=7", "w0 (rank 0)", "step=8"):
        assert said in error.message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (CollectiveCall(Kind.GATHER, 0), CollectiveCall(Kind.GATHER, 1)),
        (CollectiveCall(Kind.ALL_GATHER), CollectiveCall(Kind.GATHER, 0)),
        (
            CollectiveCall(Kind.ALL_REDUCE, operation=Operation.SUM, dtype="", shape=()),
            CollectiveCall(Kind.ALL_REDUCE, operation=Operation.MAX, dtype="", shape=()),
        ),
    ],
)
def test_calls_differ_by_kind_root_and_operation(first: CollectiveCall, second: CollectiveCall) -> None:
    one = hub()
    one.take(0, Contribution(1, first, value()))
    assert error_of(one, 1, Contribution(1, second, value())).code == "collective_mismatch"


@pytest.mark.parametrize(("dtype", "shape"), [("<f4", (2,)), ("<f8", (3,)), ("<f8", (2, 1))])
def test_reductions_differ_by_type_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    def reduction(dtype: str, shape: tuple[int, ...]) -> Contribution:
        call = CollectiveCall(Kind.ALL_REDUCE, operation=Operation.SUM, dtype=dtype, shape=shape)
        return Contribution(1, call, Value(Form.ARRAY, memoryview(b""), dtype, shape))

    one = hub()
    one.take(0, reduction("<f8", (2,)))
    assert error_of(one, 1, reduction(dtype, shape)).code == "collective_mismatch"


@pytest.mark.parametrize(("rank", "number"), [(1, 1), (2, 0), (2, 2)])
def test_rank_that_calls_twice_or_out_of_order_is_blamed(rank: int, number: int) -> None:
    one = hub()
    one.take(1, Contribution(1, BARRIER))
    error = error_of(one, rank, Contribution(number, BARRIER))
    assert isinstance(error, PeerError)
    assert f"w{rank} (rank {rank})" in error.message


@pytest.mark.parametrize(
    "contribution",
    [
        Contribution(1, BARRIER, value()),
        Contribution(1, CollectiveCall(Kind.GATHER, 0)),
        Contribution(1, CollectiveCall(Kind.BROADCAST, 0), value()),
        Contribution(1, CollectiveCall(Kind.BROADCAST, 1)),
        Contribution(1, CollectiveCall(Kind.ALL_REDUCE, operation=Operation.SUM, dtype="<f8", shape=(2,)), value()),
    ],
)
def test_rank_whose_value_does_not_match_its_call_is_blamed(contribution: Contribution) -> None:
    assert isinstance(error_of(hub(), 1, contribution), PeerError)


def test_invalid_root_is_refused() -> None:
    assert (
        error_of(hub(), 1, Contribution(1, CollectiveCall(Kind.GATHER, 3), value())).code == "collective_root_invalid"
    )


def test_largest_stop_wish_counts() -> None:
    step = CollectiveCall(Kind.END_STEP, step=1)
    collected = collect(hub(), *(Contribution(1, step, stop_wanted=wanted) for wanted in (0, 9, 4)))
    assert collected.stop_wanted == 9


@pytest.mark.parametrize("call", [CollectiveCall(Kind.ALL_GATHER), CollectiveCall(Kind.GATHER, 0)])
def test_too_large_gather_is_refused_early_with_its_sum(call: CollectiveCall) -> None:
    piece = value(bytes(COLLECTIVE_BYTES_MAX // 2 + 1))
    one = hub(12)
    one.take(7, Contribution(1, call, piece))
    error = error_of(one, 3, Contribution(1, call, piece))
    assert error.code == "collective_too_large"
    assert str(COLLECTIVE_BYTES_MAX + 2) in error.message


def test_earlier_gathers_do_not_count_towards_the_limit() -> None:
    one, call, piece = hub(2), CollectiveCall(Kind.ALL_GATHER), value(bytes(COLLECTIVE_BYTES_MAX // 2))
    for number in (1, 2):
        one.take(1, Contribution(number, call, piece))
        assert one.take(0, Contribution(number, call, piece)) is not None


@pytest.mark.parametrize(("size", "is_refused"), [(16, False), (17, True)])
def test_too_large_reduction_is_refused_at_the_first_call(size: int, is_refused: bool) -> None:
    data = bytes(COLLECTIVE_BYTES_MAX)
    call = CollectiveCall(Kind.ALL_REDUCE, operation=Operation.SUM, dtype="|u1", shape=(len(data),))
    contribution = Contribution(1, call, Value(Form.ARRAY, memoryview(data), "|u1", (len(data),)))
    if not is_refused:
        assert hub(size).take(5, contribution) is None
        return
    error = error_of(hub(size), 5, contribution)
    assert error.code == "collective_too_large"
    assert str(17 * COLLECTIVE_BYTES_MAX) in error.message
    assert str(REDUCED_BYTES_MAX) in error.message


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (CollectiveCall(Kind.GATHER, 1), [False, True, False]),
        (CollectiveCall(Kind.BROADCAST, 1), [True, False, True]),
        (CollectiveCall(Kind.ALL_GATHER), [True, True, True]),
    ],
)
def test_only_ranks_that_need_the_values_receive_them(call: CollectiveCall, expected: list[bool]) -> None:
    assert [call.receives(rank) for rank in range(3)] == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (CollectiveCall(Kind.GATHER, 1), [0, 3, 0]),
        (CollectiveCall(Kind.BROADCAST, 1), [1, 0, 1]),
        (CollectiveCall(Kind.ALL_GATHER), [3, 3, 3]),
        (CollectiveCall(Kind.ALL_REDUCE), [1, 1, 1]),
        (BARRIER, [0, 0, 0]),
        (CollectiveCall(Kind.END_STEP), [0, 0, 0]),
    ],
)
def test_each_rank_receives_its_number_of_values(call: CollectiveCall, expected: list[int]) -> None:
    assert [call.values_due(rank, 3) for rank in range(3)] == expected


def test_missing_ranks_are_named_up_to_a_limit() -> None:
    one = hub(100)
    one.take(1, Contribution(1, BARRIER))
    missing = one.missing()
    assert missing.startswith("w0 (rank 0), w2 (rank 2)")
    assert missing.endswith(f"and {99 - NAMES_MAX} more")
