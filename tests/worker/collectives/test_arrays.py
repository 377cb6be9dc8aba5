from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.format.dtypes import EXTENDED
from forged.errors import ForgedError, PeerError, RequestRefused
from forged.worker.collectives import arrays
from forged.worker.collectives.arrays import (
    Array,
    check_operation,
    check_out,
    check_reduced,
    pack,
    pack_array,
    reduce,
    unpack,
    unpack_into,
)
from forged.worker.transport.peer_messages import COLLECTIVE_BYTES_MAX, Form, Operation, Value

DTYPES = ["<f8", "<f4", "<f2", ">f8", "<i8", "|i1", "|u1", "<u4", "<c16", "|b1", "<m8[s]"]
MASKED = np.ma.masked_array([1.0, 1e9], [False, True])


def wire(value: Value) -> Value:
    """As it comes out at the other end."""
    return Value(value.form, memoryview(bytes(value.data)), value.dtype, value.shape)


@st.composite
def some_arrays(draw: st.DrawFn) -> Array:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = dtype.itemsize * int(np.prod(shape, dtype=int))
    bits = np.frombuffer(bytearray(draw(st.binary(min_size=size, max_size=size))), np.uint8)
    return (bits & 1 if dtype.kind == "b" else bits).view(dtype).reshape(shape)


@given(some_arrays())
def test_an_array_comes_back_bit_for_bit(array: Array) -> None:
    back = unpack(wire(pack(array)))
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


@given(some_arrays())
def test_non_contiguous_array_round_trips(array: Array) -> None:
    turned = array.T[::-1] if array.ndim else array
    assert unpack(wire(pack(turned))).tobytes() == turned.tobytes()


@pytest.mark.parametrize("name", sorted(EXTENDED))
def test_types_of_ml_dtypes_come_back_bit_for_bit(name: str) -> None:
    array = np.arange(6, dtype=np.float32).astype(getattr(ml_dtypes, name))
    back = unpack(wire(pack(array)))
    assert (back.dtype, back.tobytes()) == (array.dtype, array.tobytes())


@pytest.mark.parametrize("number", [0, -(2**62), 1.5, True, 2j, np.float32(0.1), np.int8(-3)])
def test_a_number_comes_back_as_the_same_kind_of_number(number: Any) -> None:
    back = unpack(wire(pack(number)))
    assert back == number
    assert type(back) is type(number)


@pytest.mark.parametrize(
    "given_bytes",
    [
        b"",
        b"abc",
        bytearray(b"abc"),
        memoryview(b"abc"),
        memoryview(b"abcdef")[::2],
        np.empty((0, 3)).data,
        np.ones(2, ">f4").data,
    ],
)
def test_bytes_come_back_as_bytes(given_bytes: bytes) -> None:
    assert unpack(wire(pack(given_bytes))) == bytes(given_bytes)


@pytest.mark.parametrize(
    "unfit",
    ["text", None, [1.0], {}, 2**70, np.array([object()]), np.zeros(1, np.dtype([("a", "i4")])), MASKED],
)
def test_value_that_is_neither_number_nor_bytes_is_refused(unfit: Any) -> None:
    with pytest.raises(RequestRefused) as raised:
        pack(unfit)
    assert raised.value.code == "collective_unfit"


def test_too_large_value_is_refused_with_the_limit() -> None:
    with pytest.raises(RequestRefused, match=str(COLLECTIVE_BYTES_MAX)) as raised:
        pack(np.zeros(COLLECTIVE_BYTES_MAX + 1, np.uint8))
    assert raised.value.code == "collective_too_large"


def test_sum_adds_ranks_in_order() -> None:
    """In another order these floats have another sum."""
    ranks = [np.float32(1e8), np.float32(-1e8), np.float32(1.0)]
    assert unpack(reduce(Operation.SUM, [pack(one) for one in ranks])) == 1.0
    assert unpack(reduce(Operation.SUM, [pack(one) for one in (ranks[2], *ranks[:2])])) == 0.0


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<i4", "|u1", "<c8", ">f4"])
def test_reductions_match_numpy(dtype: str) -> None:
    given_arrays = [np.array([[1, 5], [3, rank]], dtype) for rank in range(4)]
    values = [pack(array) for array in given_arrays]
    for operation, expected in [
        (Operation.SUM, sum(given_arrays[1:], given_arrays[0])),
        (Operation.MEAN, np.mean(given_arrays, axis=0)),
        (Operation.MIN, np.min(given_arrays, axis=0)),
        (Operation.MAX, np.max(given_arrays, axis=0)),
    ]:
        np.testing.assert_array_equal(unpack(reduce(operation, values)), expected)


def test_reduction_keeps_the_type_except_the_mean_of_integers() -> None:
    small = [pack(np.array([200], np.uint8)), pack(np.array([100], np.uint8))]
    assert reduce(Operation.SUM, small).dtype == "|u1"
    assert reduce(Operation.MEAN, small).dtype == "<f8"
    assert unpack(reduce(Operation.MEAN, small)) == [150.0]
    assert reduce(Operation.MEAN, [pack(np.array([1], np.float16)), pack(np.array([2], np.float16))]).dtype == "<f2"


def test_overflow_gives_infinity_without_a_warning() -> None:
    assert unpack(reduce(Operation.SUM, [pack(np.array([6e4], np.float16)), pack(np.array([6e4], np.float16))])) == [
        np.inf
    ]


def test_reduction_does_not_change_its_operands() -> None:
    first = np.array([1.0, 2.0])
    reduce(Operation.MEAN, [pack(first), pack(np.array([3.0, 4.0]))])
    assert first.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("operation", "array"),
    [
        (Operation.SUM, np.array(["2020-01-01"], "M8[D]")),
        (Operation.SUM, np.array(["ab"])),
        (Operation.MEAN, np.array([b"ab"])),
        (Operation.MIN, np.array(["ab"])),
    ],
)
def test_types_that_numpy_cannot_reduce_are_refused(operation: Operation, array: Array) -> None:
    with pytest.raises(RequestRefused) as raised:
        check_operation(operation, pack_array(array))
    assert raised.value.code == "collective_unfit"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", Operation)
def test_types_that_numpy_can_reduce_are_accepted(operation: Operation, dtype: str) -> None:
    value = pack_array(np.ones(2, dtype))
    check_operation(operation, value)
    assert reduce(operation, [value, value]).shape == (2,)


def test_result_is_written_only_into_a_matching_array() -> None:
    value = pack_array(np.array([1, 2], np.int32))
    out = np.zeros(2, np.int32)
    check_out(value, Operation.SUM, out)
    assert unpack_into(value, out) is out
    assert out.tolist() == [1, 2]
    frozen = np.zeros(2, np.int32)
    frozen.flags.writeable = False
    for unfit in (np.zeros(3, np.int32), np.zeros(2, np.int64), np.zeros((2, 1), np.int32), frozen):
        with pytest.raises(RequestRefused) as raised:
            check_out(value, Operation.SUM, unfit)
        assert raised.value.code == "collective_out_unfit"
    check_out(value, Operation.MEAN, np.zeros(2))


@pytest.mark.parametrize(
    "value",
    [
        Value(Form.ARRAY, memoryview(b"1234"), "no such type", (1,)),
        Value(Form.ARRAY, memoryview(b"12345678"), "O", (1,)),
        Value(Form.ARRAY, memoryview(b"1234"), "<f8", (1,)),
        Value(Form.ARRAY, memoryview(b""), "<f8", (2**40, 2**40)),
        Value(Form.ARRAY, memoryview(b"1234"), "f4,(", (1,)),
        Value(Form.ARRAY, memoryview(b"1234"), "(" * 10_000, (1,)),
        Value(Form.ARRAY, memoryview(b"12345678"), "f4,f4", (1,)),
        Value(Form.ARRAY, memoryview(b"12345678"), "(2,)f4", (1,)),
        Value(Form.ARRAY, memoryview(b""), "V0", (5,)),
        Value(Form.NUMBER, memoryview(b"12345678"), "<f4", (2,)),
        Value(Form.SCALAR, memoryview(b"1234"), "<f4", (1,)),
    ],
)
def test_invalid_value_is_a_peer_error(value: Value) -> None:
    with pytest.raises(PeerError):
        unpack(value)


@pytest.mark.parametrize("reduced", [np.zeros(3), np.zeros(2, np.float32), np.float64(0)])
def test_result_that_does_not_match_the_operand_is_a_peer_error(reduced: Any) -> None:
    own = pack_array(np.zeros(2))
    check_reduced(Operation.SUM, own, own)
    with pytest.raises(PeerError):
        check_reduced(Operation.SUM, own, pack_array(reduced))


def test_the_mean_of_integers_comes_back_as_floats() -> None:
    check_reduced(Operation.MEAN, pack_array(np.zeros(2, np.int8)), pack_array(np.zeros(2)))


def test_the_memory_of_an_array_is_not_copied() -> None:
    array = np.zeros(3)
    arrays.memory_of(array)[0:8] = np.float64(7).tobytes()
    assert array[0] == 7


def test_every_refusal_is_a_forged_error() -> None:
    with pytest.raises(ForgedError):
        pack(object())  # type: ignore[arg-type]
