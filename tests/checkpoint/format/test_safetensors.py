from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.dtypes import EXTENDED, SAFETENSORS, dtype_of
from forged.checkpoint.format.safetensors import (
    HEADER_BYTES_MAX,
    METADATA,
    PAGE,
    PLACE_BYTES,
    Header,
    TensorEntry,
    encode_header,
    parse_header,
    read_header,
)

FILE = "a.safetensors"


class Bytes:
    """A file in memory that counts the bytes read."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self._data = data
        self.size = len(data) if size is None else size
        self.read = 0

    def read_into(self, offset: int, *rooms: memoryview) -> None:
        for room in rooms:
            self.read += len(room)
            room[:] = self._data[offset : offset + len(room)]
            offset += len(room)

    def mapped(self) -> memoryview | None:
        return None


def written(arrays: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str] | None = None) -> bytes:
    """A whole file."""
    entries = [TensorEntry(name, array.dtype.name, array.shape, array.nbytes) for name, array in arrays.items()]
    return encode_header(entries, metadata or {}) + b"".join(array.tobytes() for array in arrays.values())


def said(header: object, data: bytes = b"", *, text: bytes | None = None) -> Header:
    """The result of parsing this header."""
    text = json.dumps(header).encode() if text is None else text
    return read_header(Bytes(len(text).to_bytes(PLACE_BYTES, "little") + text + data), FILE)


def refused(header: object, data: bytes = b"", *, text: bytes | None = None) -> CheckpointException:
    with pytest.raises(CheckpointException) as caught:
        said(header, data, text=text)
    assert caught.value.checkpoint_path == FILE
    return caught.value


def one(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


NUMPYS = [name for name in SAFETENSORS if name not in EXTENDED]


@pytest.mark.parametrize("name", NUMPYS)
def test_the_library_opens_written_files(name: str) -> None:
    arrays = {
        "matrix": (np.arange(6) % 2).astype(dtype_of(name)).reshape(2, 3),
        "empty": np.empty((0, 4), dtype_of(name)),
        "number": np.ones((), dtype_of(name)),
    }
    found = safetensors.numpy.load(written(arrays, {"format": "np"}))
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        assert found[key].dtype == array.dtype
        np.testing.assert_array_equal(found[key], array)


@pytest.mark.parametrize("name", sorted(SAFETENSORS.keys() & EXTENDED))
def test_the_library_knows_the_types_that_numpy_lacks(name: str) -> None:
    array = np.arange(4).astype(dtype_of(name))
    ((key, found),) = safetensors.deserialize(written({"x": array}))  # type: ignore[no-untyped-call]
    assert (key, found["dtype"], found["shape"]) == ("x", SAFETENSORS[name], [4])
    assert bytes(found["data"]) == array.tobytes()


@pytest.mark.parametrize("name", [*sorted(EXTENDED - SAFETENSORS.keys()), ">f4", "<U3", "|S5", "complex128", "<M8[s]"])
def test_types_that_the_format_lacks_are_stored_as_bytes(name: str) -> None:
    array = np.zeros((2, 3), dtype_of(name))
    data = encode_header([TensorEntry("x", name, array.shape, array.nbytes)], {}) + array.tobytes()
    found = safetensors.numpy.load(data)["x"]
    assert (found.dtype.name, found.shape) == ("uint8", (array.nbytes,))


def test_arrays_begin_at_a_page() -> None:
    for count in (0, 1, 50, 80):
        header = encode_header([TensorEntry(f"name {number}", "float32", (1,), 4) for number in range(count)], {})
        assert len(header) % PAGE == 0
        assert parse_header(header[PLACE_BYTES:], 4 * count, FILE).data_offset == len(header)


def test_a_header_above_the_library_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forged.checkpoint.format.safetensors.HEADER_BYTES_MAX", PAGE - PLACE_BYTES)
    entries = [TensorEntry(f"name {number}", "float32", (1,), 4) for number in range(80)]
    assert len(encode_header(entries[:40], {})) == PAGE
    with pytest.raises(CheckpointException) as caught:
        encode_header(entries, {})
    assert caught.value.type is ExceptionType.VALIDATION_FAILED


def test_colliding_names_are_made_unique() -> None:
    entries = [TensorEntry(name, "uint8", (1,), 1) for name in ("x", "x", "x (2)", "x", METADATA)]
    found = safetensors.numpy.load(encode_header(entries, {}) + bytes(range(5)))
    assert {name: int(array[0]) for name, array in found.items()} == {
        "x": 0,
        "x (2)": 1,
        "x (2) (2)": 2,
        "x (3)": 3,
        f"{METADATA} (2)": 4,
    }


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda name: name != METADATA),
        st.tuples(st.sampled_from(["uint8", "float32", "float64"]), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_written_headers_are_read_back(arrays: dict[str, tuple[str, list[int]]], metadata: dict[str, str]) -> None:
    made = {name: np.zeros(shape, dtype_of(dtype)) for name, (dtype, shape) in arrays.items()}
    data = written(made, metadata)
    header = read_header(Bytes(data), FILE)
    assert header.metadata == metadata
    assert [(entry.name, entry.dtype, entry.shape) for entry in header.entries] == [
        (name, array.dtype.name, array.shape) for name, array in made.items()
    ]
    assert [start + entry.nbytes for start, entry in zip(header.starts, header.entries, strict=True)] == [
        *header.starts[1:],
        *[len(data)] * bool(made),
    ]


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex64"])
def test_files_of_the_library_are_read(dtype: str) -> None:
    arrays = {"b": np.ones((3, 2), dtype), "a": np.zeros(5, dtype)}
    data = safetensors.numpy.save(arrays, {"who": "me"})
    header = read_header(Bytes(data), FILE)
    assert header.metadata == {"who": "me"}
    for start, entry in zip(header.starts, header.entries, strict=True):
        assert (entry.dtype, entry.shape) == (dtype, arrays[entry.name].shape)
        assert data[start : start + entry.nbytes] == arrays[entry.name].tobytes()


def test_no_more_than_the_header_is_read() -> None:
    file = Bytes(written({"x": np.zeros(1000)}))
    read_header(file, FILE)
    assert file.read == PAGE


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8, b"\xff" * 100, (100).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_too_short_for_its_header_is_refused(data: bytes) -> None:
    file = Bytes(data)
    with pytest.raises(CheckpointException) as caught:
        read_header(file, FILE)
    assert caught.value.type is ExceptionType.CORRUPTED_CHECKPOINT
    assert file.read <= PLACE_BYTES


def test_a_declared_header_above_the_limit_takes_no_memory() -> None:
    file = Bytes((HEADER_BYTES_MAX + 1).to_bytes(8, "little"), 1 << 40)
    with pytest.raises(CheckpointException):
        read_header(file, FILE)
    assert file.read == PLACE_BYTES


HOSTILE: dict[str, tuple[Any, bytes]] = {
    "no object": ([1], b""),
    "an array that is a number": ({"x": 1}, b""),
    "a field too many": ({"x": one() | {"more": 1}}, bytes(8)),
    "a field too few": ({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "a shape that is a number": ({"x": one(shape=2)}, bytes(8)),
    "a negative size": ({"x": one(shape=(-1, -2))}, bytes(8)),
    "a size that is broken": ({"x": one(shape=(2.5,))}, bytes(8)),
    "a size beyond all memory": ({"x": one(shape=(1 << 62, 4))}, bytes(8)),
    "a size that is too large times nothing": ({"x": one(shape=(1 << 61, 0), offsets=(0, 0))}, b""),
    "too many axes": ({"x": one(shape=(1,) * 40, offsets=(0, 4))}, bytes(4)),
    "bytes that are not those of its shape": ({"x": one(shape=(3,))}, bytes(8)),
    "three offsets": ({"x": one(offsets=(0, 8, 8))}, bytes(8)),
    "offsets the wrong way round": ({"x": one(offsets=(8, 0))}, bytes(8)),
    "a negative offset": ({"x": one(offsets=(-8, 0))}, bytes(8)),
    "an offset behind the end": ({"x": one(offsets=(8, 16))}, bytes(8)),
    "an array that is longer than the file": ({"x": one()}, bytes(4)),
    "bytes behind the last array": ({"x": one()}, bytes(12)),
    "bytes before the first array": ({"x": one(offsets=(4, 12))}, bytes(12)),
    "arrays that overlap": ({"x": one(), "y": one(offsets=(4, 12))}, bytes(12)),
    "arrays in one place": ({"x": one(), "y": one()}, bytes(8)),
    "a hole between arrays": ({"x": one(), "y": one(offsets=(12, 20))}, bytes(20)),
    "metadata that is no text": ({METADATA: {"x": 1}}, b""),
    "metadata that is a list": ({METADATA: []}, b""),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_header_with_this_fault_is_refused(what: str) -> None:
    header, data = HOSTILE[what]
    assert refused(header, data).code == "checkpoint_header_malformed"


def test_an_unknown_type_is_named() -> None:
    error = refused({"x": one("F6_E2M3")}, bytes(8))
    assert error.code == "checkpoint_dtype_unknown"
    assert "F6_E2M3" in error.message


ONE = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    "text",
    [
        f'{{"x":{ONE},"x":{ONE}}}',
        f'{{"x":{ONE},"\\u0078":{ONE}}}',
        f'{{"x":{ONE},"x":{{"\\u0064type":"F32","shape":[2],"data_offs\\u0065ts":[0,8]}}}}',
        '{"x":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
        f'{{"__metadata__":{{"a":"1","a":"2"}},"x":{ONE}, "dtype":{ONE}}}',
        f'{{"__metadata__":{{}},"__metadata__":{{}},"x":{ONE},"x":{ONE}}}',
    ],
)
def test_duplicate_keys_are_refused(text: str) -> None:
    refused(None, bytes(8), text=text.encode())


def test_names_that_look_like_fields_are_names() -> None:
    header = said({METADATA: {"dtype": "shape"}, "shape": one(), "data_offsets": one(offsets=(8, 16))}, bytes(16))
    assert [entry.name for entry in header.entries] == ["shape", "data_offsets"]
    assert header.metadata == {"dtype": "shape"}


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b'{"x":', b"\xff\xfe", b'{"\xff":{}}', b"[" * 100_000, b'{"x":' * 100_000, b'{"x":' + b"[" * 100_000],
)
def test_invalid_json_is_refused(text: bytes) -> None:
    refused(None, text=text)


@given(st.data())
def test_a_flipped_bit_gives_a_header_or_a_typed_error(data: st.DataObject) -> None:
    whole = bytearray(written({"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(3, np.int64)}, {"a": "b"}))
    whole[data.draw(st.integers(0, 300))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        header = read_header(Bytes(bytes(whole)), FILE)
    except CheckpointException:
        return
    assert sum(entry.nbytes for entry in header.entries) == len(whole) - header.data_offset
