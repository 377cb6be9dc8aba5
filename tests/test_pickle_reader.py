from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged import pickle_reader as reader
from forged.memory.traces import TraceFileInvalid, TraceRefused, TraceTooLarge
from forged.memory.traces.trace_files import parse_trace
from forged.pickle_reader import PickleRefused, Record, read_pickle
from tests.memory.traces.snapshots import entry, segment, snapshot

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)
VALID = snapshot([[entry("alloc", 0, 512), entry("free_completed", 0, 512)]], [segment((8, "active_allocated"))])


@given(PLAIN, st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol)) == value


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_that_would_call_something_is_refused_and_calls_nothing(tmp_path: Path) -> None:
    with pytest.raises(PickleRefused, match=r"byte \d+: the operation \w*GLOBAL is refused: only plain values"):
        read_pickle(pickle.dumps(Evil(tmp_path / "called")))
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("value", [OrderedDict(a=1), {1, 2}, frozenset({1}), complex(1, 2), bytearray(b"x"), Path("x")])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_values_of_classes_are_refused(value: object, protocol: int) -> None:
    with pytest.raises(PickleRefused, match="is refused"):
        read_pickle(pickle.dumps({"a": value}, protocol))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
        b"\x80\x02(S'ls'\nios\nsystem\n.",
        b"\x80\x02(cos\nsystem\nS'ls'\no.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02Pname\n.",
        b"\x80\x02K\x01Q.",
        b"\x80\x05\x97.",
        b"\x80\x02}(]K\x01u.",
        b"\x80\x02}((K\x01tK\x01u.",
        b"\x80\x02]}K\x01s.",
        b"\x80\x02NNa.",
        b"\x80\x02NN.",
        b"\x80\x02(N.",
        b"\x80\x02(",
        b"\x80\x02.",
        b"\x80\x02a.",
        b"\x80\x02h\x07.",
        b"\x80\x02N\x86.",
        b"\x80\x02}(Nu.",
        b"\x80\xff.",
        b"\x80",
        b"\x80\x02\xff.",
        b"\x80\x02I" + b"9" * 5000 + b"\n.",
    ],
)
def test_hostile_and_damaged_pickles_are_refused_with_the_position(data: bytes) -> None:
    with pytest.raises(PickleRefused, match=r"^byte \d+: "):
        read_pickle(data)


@pytest.mark.parametrize("data", [b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60), b"\x80\x02\x8b\xff\xff\xff\x7f"])
def test_a_length_beyond_the_file_is_refused_without_the_memory(data: bytes) -> None:
    with pytest.raises(PickleRefused, match="the pickle is damaged"):
        read_pickle(data)


def test_a_large_memo_index_needs_no_memory() -> None:
    assert read_pickle(b"\x80\x02Nr\xff\xff\xff\x7f0j\xff\xff\xff\x7f.") is None


def test_deep_nesting_needs_no_stack_of_calls() -> None:
    depth = 200_000
    with pytest.raises(TraceFileInvalid, match="a dict is wanted, got a list"):
        parse_trace(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    with pytest.raises(TraceFileInvalid, match="a key is a tuple"):
        parse_trace(b"\x80\x02}N" + b"\x85" * depth + b"Ns.")


def test_more_values_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "VALUES_MAX", 100)
    with pytest.raises(PickleRefused, match="more than 100 values"):
        read_pickle(b"\x80\x02" + b"]" * 200 + b".")
    with pytest.raises(TraceTooLarge, match="more than"):
        parse_trace(b"\x80\x02" + b"]" * 200 + b".")


@given(st.integers(0, len(VALID) - 1))
def test_a_snapshot_that_is_cut_off_is_refused(length: int) -> None:
    with pytest.raises(TraceRefused):
        parse_trace(VALID[:length])


@given(st.data())
def test_a_snapshot_with_changed_bytes_is_read_or_refused(data: st.DataObject) -> None:
    changed = bytearray(VALID)
    for at in data.draw(st.lists(st.integers(0, len(VALID) - 1), min_size=1, max_size=4)):
        changed[at] = data.draw(st.integers(0, 255))
    with suppress(TraceRefused):
        parse_trace(bytes(changed))


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"device_traces": 3},
        {"device_traces": [3]},
        {"device_traces": [[3]]},
        {"device_traces": [[{"action": "alloc"}]]},
        {"device_traces": [[{"action": "alloc", "addr": -1, "size": 1}]]},
        {"device_traces": [[{"action": "alloc", "addr": 1, "size": 1.5}]]},
        {"segments": [{"device": 0}]},
        {"segments": [{"device": 0, "address": 1, "blocks": [7]}]},
        {"segments": [{"device": "0"}]},
        {},
    ],
)
def test_a_pickle_that_is_no_snapshot_is_refused(value: object) -> None:
    with pytest.raises(TraceFileInvalid) as caught:
        parse_trace(pickle.dumps(value))
    assert caught.value.fix


class TestFunctions:
    """Functions that the reader gives for classes of the pickle."""

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_given_function_is_called_in_place_of_the_class(self, protocol: int) -> None:
        data = pickle.dumps({"a": OrderedDict(b=1), "c": OrderedDict()}, protocol)
        assert read_pickle(data, {"collections.OrderedDict": dict}) == {"a": {"b": 1}, "c": {}}

    @pytest.mark.parametrize("protocol", [2, 4])
    def test_other_classes_are_refused_by_name(self, protocol: int, tmp_path: Path) -> None:
        data = pickle.dumps([OrderedDict(), Evil(tmp_path / "called")], protocol)
        with pytest.raises(PickleRefused, match=r"is refused: no class or function of the pickle is used"):
            read_pickle(data, {"collections.OrderedDict": dict})
        assert not (tmp_path / "called").exists()

    def test_object_with_a_state_is_a_record(self) -> None:
        named = b"\x80\x02cm\nC\n)\x81}X\x01\x00\x00\x00aK\x01sb."
        found = read_pickle(named, {"m.C": Record})
        assert isinstance(found, Record)
        assert found.state == {"a": 1}

    @pytest.mark.parametrize(
        "data",
        [
            b"\x80\x02cm\nC\nK\x01R.",
            b"\x80\x02K\x01)R.",
            b"\x80\x02K\x01}b.",
            b"\x80\x02cm\nC\n(K\x01K\x02tR.",
            b"\x80\x02K\x01Q.",
            b"\x80\x02\x93.",
            b"\x80\x02R.",
        ],
    )
    def test_invalid_calls_are_refused(self, data: bytes) -> None:
        def one(value: object) -> object:
            raise ValueError("no")

        with pytest.raises(PickleRefused, match=r"^byte \d+: "):
            read_pickle(data, {"m.C": one}, one)
