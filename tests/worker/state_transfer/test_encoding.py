"""A training state on its way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from forged.errors import PeerError, RequestRefused, Unavailable
from forged.worker.state_transfer import encoding as states
from forged.worker.state_transfer.encoding import BYTES_IN_HEAD_MAX, DEPTH_MAX, Arriving, Packed, copy_of, pack
from forged.worker.transport.peer_messages import HEAD_BYTES_MAX, PARTS_MAX

DTYPES = (
    stnp.boolean_dtypes()
    | stnp.integer_dtypes(endianness="?")
    | stnp.unsigned_integer_dtypes()
    | stnp.floating_dtypes(endianness="?")
    | stnp.complex_number_dtypes()
    | stnp.byte_string_dtypes()
    | stnp.unicode_string_dtypes()
    | stnp.datetime64_dtypes()
)
ARRAYS = DTYPES.flatmap(lambda dtype: stnp.arrays(dtype, stnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
SCALARS = st.sampled_from(
    [np.float32(0.1), np.int8(-3), np.bool_(True), np.complex64(1j), np.float64("nan"), np.str_("ä"), np.uint64(2**63)]
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary()
KEYS = st.none() | st.text(max_size=4) | st.integers(-5, 5) | st.floats(allow_nan=False) | st.binary(max_size=2)
LEAVES = ARRAYS | SCALARS | PLAIN
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=10,
)
U8 = [["|u1", [2]]]
STATES = st.dictionaries(st.text(max_size=4), TREES, max_size=4)


def carried(state: Any, target: Any) -> Any:
    """What becomes of the target when the state has arrived there."""
    packed = pack(state)
    arriving = Arriving(packed.head)
    fill(arriving, packed)
    arriving.adopt(target)
    return target


def fill(arriving: Arriving, packed: Packed) -> None:
    assert [part.nbytes for part in arriving.parts] == [part.nbytes for part in packed.parts]
    for room, part in zip(arriving.parts, packed.parts, strict=True):
        room[:] = part


def same(one: Any, other: Any) -> bool:
    """Bit for bit, with types, shapes and the order of keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            type(a) is type(b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return bool(msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other))


class Moments(NamedTuple):
    """As many optimizers keep them."""

    m: Any
    v: Any


class Model:
    """Brings its state by itself."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.loads = 0

    def state_dict(self) -> Mapping[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]
        self.loads += 1


@given(STATES, STATES)
def test_loaded_state_equals_the_sent_one_for_any_target(state: Any, target: Any) -> None:
    assert same(carried(state, target), state)


@given(STATES)
def test_state_can_be_saved_and_restored(state: dict[str, Any]) -> None:
    before = carried(state, {})
    restore = copy_of(state)
    for _ in range(2):
        for value in state.values():
            if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
                value[...] = 1
        state["something else"] = [1, 2]
        restore()
        assert same(state, before)


def test_received_state_does_not_share_memory_with_the_sent_one() -> None:
    state: dict[str, Any] = {"w": np.zeros(3), "l": [np.zeros(3)]}
    arrived = carried(state, {})
    state["w"][:] = 1
    assert not arrived["w"].any()


def test_arrays_are_sent_without_a_copy() -> None:
    array = np.arange(6.0).reshape(2, 3)
    (part,) = pack({"w": array}).parts
    assert np.shares_memory(np.frombuffer(part, np.uint8), array)


@pytest.mark.parametrize(
    "array",
    [np.arange(12).reshape(3, 4).T, np.arange(12)[::-2], np.asfortranarray(np.eye(3)), np.broadcast_to(7, (2, 2))],
    ids=["transposed", "backwards", "fortran", "broadcast"],
)
def test_slices_and_views_arrive_with_their_values(array: Any) -> None:
    arrived = carried({"w": array}, {})["w"]
    assert arrived.flags.c_contiguous
    np.testing.assert_array_equal(arrived, array)


LONG = bytes(range(256)) * 17
"""Longer than what a head holds."""


class TestLongBytes:
    @pytest.mark.parametrize("size", [0, BYTES_IN_HEAD_MAX, BYTES_IN_HEAD_MAX + 1, HEAD_BYTES_MAX + 1])
    def test_bytes_of_any_length_come_back_as_bytes(self, size: int) -> None:
        state = {"a": (LONG * (size // len(LONG) + 1))[:size], "b": [{"c": (bytes(size), 1)}]}
        assert same(carried(state, {}), state)

    def test_bytes_are_sent_without_a_copy(self) -> None:
        (part,) = pack({"a": LONG}).parts
        assert np.shares_memory(np.frombuffer(part, np.uint8), np.frombuffer(LONG, np.uint8))

    def test_bytes_are_saved_and_restored(self) -> None:
        state = {"a": LONG}
        restore = copy_of(state)
        state["a"] = b"else"
        restore()
        assert same(state, {"a": LONG})

    def test_bytes_subclass_arrives_as_bytes(self) -> None:
        class Derived(bytes):
            pass

        assert same(carried({"a": Derived(LONG)}, {}), {"a": LONG})

    def test_head_that_repeats_long_bytes_allocates_them_once(self) -> None:
        arriving = Arriving(msgspec.msgpack.encode({"tree": ["d", [["a", ["l", [["b", 0]] * 100]]]], "arrays": U8}))
        arriving.parts[0][:] = b"ab"
        target: dict[str, Any] = {}
        arriving.adopt(target)
        assert target == {"a": [b"ab"] * 100}
        assert len({id(one) for one in target["a"]}) == 1


class TestTooLarge:
    def test_too_long_text_is_refused_with_its_path_and_size(self) -> None:
        state = {"name": "x", "model": [{"vocabulary": "ä" * (HEAD_BYTES_MAX // 2 + 1)}]}
        with pytest.raises(RequestRefused, match=r"state\['model'\]\[0\]\['vocabulary'\], has 16777218") as raised:
            pack(state)
        assert (raised.value.code, "as bytes" in raised.value.fix) == ("state_too_large", True)

    def test_too_many_plain_numbers_are_refused(self) -> None:
        with pytest.raises(RequestRefused, match="limit 16777216") as raised:
            pack({"losses": [0.5] * (HEAD_BYTES_MAX // 10)})
        assert (raised.value.code, "as an array" in raised.value.fix) == ("state_too_large", True)

    def test_too_many_arrays_are_refused_with_their_number(self) -> None:
        one = np.zeros(1)
        pack({"many": [one] * PARTS_MAX})
        with pytest.raises(RequestRefused, match=f"state has {PARTS_MAX + 1} arrays") as raised:
            copy_of({"many": [one] * (PARTS_MAX + 1)})
        assert (raised.value.code, raised.value.fix) == ("state_too_large", "merge small arrays into larger ones")


class TestFillingInPlace:
    def test_matching_arrays_are_filled_in_place_at_any_depth(self) -> None:
        arrays = [np.zeros(3, np.float32) for _ in range(4)]
        pair = [arrays[1], np.zeros(2)]
        target = {"w": arrays[0], "layers": pair, "deep": {"t": (arrays[2], 5)}, 3: arrays[3]}
        deep = target["deep"]
        source = {
            "w": np.ones(3, np.float32),
            "layers": [np.ones(3, np.float32), np.ones(5)],
            "deep": {"t": (np.ones(3, np.float32), 6)},
            3: np.ones(3, np.float32),
        }
        carried(source, target)
        assert all(array.all() for array in arrays)
        assert target["layers"] is pair
        assert target["deep"] is deep
        assert same(target, source)

    def test_views_into_a_larger_array_are_filled_in_place(self) -> None:
        large = np.zeros(10)
        carried({"a": np.ones(5), "b": np.full(5, 2.0)}, {"a": large[:5], "b": large[::2]})
        assert large.tolist()[1::2] == [1, 1, 0, 0, 0]
        assert large.tolist()[::2] == [2] * 5

    @pytest.mark.parametrize("unfit", [np.zeros(4), np.zeros(3, np.float32), 3, None, [1], "text"])
    def test_arrays_that_do_not_match_are_replaced(self, unfit: Any) -> None:
        assert same(carried({"w": np.ones(3)}, {"w": unfit}), {"w": np.ones(3)})

    def test_read_only_arrays_are_replaced(self) -> None:
        fixed = np.zeros(3)
        fixed.flags.writeable = False
        target = carried({"w": np.ones(3)}, {"w": fixed})
        assert target["w"] is not fixed
        assert target["w"].all()

    def test_a_named_tuple_keeps_its_type_at_any_depth(self) -> None:
        first = np.zeros(1)
        target = {"adam": Moments(first, [Moments(0, 0)]), "other": Moments(1, 2)}
        carried({"adam": Moments(np.ones(1), [Moments(3, 4)]), "other": (1, 2, 3)}, target)
        assert same(target, {"adam": Moments(np.ones(1), [Moments(3, 4)]), "other": (1, 2, 3)})
        assert target["adam"].m is first

    def test_named_tuple_is_restored_as_one(self) -> None:
        state = {"adam": Moments(np.zeros(1), 1)}
        restore = copy_of(state)
        state["adam"] = Moments(np.ones(1), 2)
        restore()
        assert same(state, {"adam": Moments(np.zeros(1), 1)})

    def test_removed_keys_are_dropped_and_the_order_is_the_senders(self) -> None:
        array = np.zeros(1)
        target = carried({"c": 1, "b": np.ones(1), "a": 2}, {"a": 0, "b": array, "gone": 1})
        assert list(target) == ["c", "b", "a"]
        assert target["b"] is array


class TestStateful:
    def test_stateful_object_saves_and_loads_its_own_state(self) -> None:
        target = carried(Model(np.arange(3)), Model(None))
        assert (target.value.tolist(), target.loads) == ([0, 1, 2], 1)

    def test_stateful_object_can_be_restored(self) -> None:
        model = Model(np.arange(3))
        restore = copy_of(model)
        model.value += 1
        restore()
        assert model.value.tolist() == [0, 1, 2]

    def test_error_of_a_stateful_object_is_reported(self) -> None:
        class Broken(Model):
            def state_dict(self) -> Mapping[str, Any]:
                raise OSError("the device is gone")

        with pytest.raises(OSError, match="the device is gone"):
            pack(Broken(1))


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ([1], "got a list"),
        (None, "got a NoneType"),
        ({"a": {"b": [object()]}}, r"state\['a'\]\['b'\]\[0\] is a object"),
        ({"a": {1, 2}}, "is a set"),
        ({"a": np.array([object()])}, "array of object"),
        ({"a": np.zeros(2, [("x", int)])}, "array of"),
        ({"a": np.ma.masked_array([1, 2], [True, False])}, "array of"),
        ({"a": 2**64}, "number in state is too large"),
        ({"a": ["b", {"c": "\udc80"}]}, r"state\['a'\]\[1\]\['c'\] is a text that is not Unicode"),
        ({"a": {"\udc80": 1}}, r"a key of state\['a'\] is a text that is not Unicode"),
        ({"a": np.zeros(2, "V0")}, "array of"),
        ({"a": {(1, 2): 1}}, r"state\['a'\] has a tuple for a key"),
        ({np.int64(1): 1}, "state has a int64 for a key"),
    ],
)
def test_untransferable_value_is_refused_with_its_path(state: Any, where: str) -> None:
    with pytest.raises(RequestRefused, match=where) as raised:
        pack(state)
    assert raised.value.code == "state_unfit"


def test_recursive_state_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(RequestRefused, match="nested too deep"):
        pack(endless)


@pytest.mark.parametrize(
    ("tree", "arrays"),
    [
        (None, []),
        (5, []),
        (["x", 1], []),
        (["a", 0], []),
        (["a", "zero"], [["<f8", [1]]]),
        (["a", [0]], [["<f8", [1]]]),
        (["l", 5], []),
        (["d", [1, 2]], []),
        (["d", [[["p", 1], ["p", 1], 3]]], []),
        (["d", [[[1, 2], ["p", 1]]]], []),
        (["t", [["l", [["a", 9]]]]], []),
        (["d", []], [["O", [1]]]),
        (["d", []], [["f8,f8", [1]]]),
        (["d", []], [["no such type", [1]]]),
        (["d", []], [["f4,(", [1]]]),
        (["d", []], [["(2,)f4", [1]]]),
        (["d", []], [["V0", [1]]]),
        (["b", 0], []),
        (["b", "zero"], U8),
        (["b", [0]], U8),
        (["d", []], [["<f8", [-1]]]),
        (["d", []], [["<f8", [2**62, 2**62]]]),
        (["d", []], [["<f8", ["many"]]]),
        ([[], 1], []),
        (["l", [["l", []]] * 3 + [7]], []),
    ],
)
def test_invalid_head_is_a_peer_error(tree: Any, arrays: Any) -> None:
    with pytest.raises(PeerError) as raised:
        Arriving(msgspec.msgpack.encode({"tree": tree, "arrays": arrays}))
    assert raised.value.code == "state_invalid"


@given(st.binary(max_size=50))
def test_random_heads_only_raise_peer_errors(head: bytes) -> None:
    with pytest.raises(PeerError):
        Arriving(head)


def test_too_deeply_nested_head_is_a_peer_error() -> None:
    tree: Any = ["p", 1]
    for _ in range(DEPTH_MAX + 2):
        tree = ["l", [tree]]
    with pytest.raises(PeerError, match="nested too deep"):
        Arriving(msgspec.msgpack.encode({"tree": tree, "arrays": []}))


def test_state_without_enough_memory_is_reported_before_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("Unable to allocate 1 EiB")

    monkeypatch.setattr(states, "_room_for", full)
    with pytest.raises(Unavailable, match="no memory"):
        Arriving(pack({"w": np.zeros(1)}).head)
