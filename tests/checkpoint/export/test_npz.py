from __future__ import annotations

import io
import tracemalloc
import zipfile
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.export import npz
from forged.checkpoint.export.npz import Archive, open_npz
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.saving.files.assembly import SavedTensors
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_writer import write_checkpoint

Array = np.ndarray[Any, Any]


def archive_of(*arrays: Array) -> Archive:
    """An archive of arrays named 0, 1 and so on."""
    storage = MemoryStorage()
    manifest = write_checkpoint(storage, "a", [list(arrays)])
    return Archive(
        SavedTensors(storage, manifest, CancelToken()), [str(number) for number in range(len(arrays))], CancelToken()
    )


def bytes_of(archive: Archive, room_bytes: int = 1 << 23) -> bytes:
    found = b""
    for offset in range(0, archive.size, room_bytes):
        found += bytes(archive.block(offset, memoryview(bytearray(room_bytes))))
    assert len(found) == archive.size
    return found


def read(data: bytes) -> dict[str, Array]:
    """All arrays of an archive."""
    storage = MemoryStorage()
    storage.publish("x.npz", data)
    with open_npz(storage, "x.npz", CancelToken()) as foreign:
        tensors = foreign.tensors
        into = {
            number: np.empty(shape, dtype_of(dtype))
            for number, (shape, dtype) in enumerate(zip(tensors.shapes, tensors.dtypes, strict=True))
        }
        foreign.fetch(list(into), {}, into)
    return dict(zip(tensors.names, into.values(), strict=True))


def invalid_file(data: bytes) -> CheckpointException:
    with pytest.raises(CheckpointException) as caught:
        read(data)
    return caught.value


DTYPES = ["u1", "f4", ">f8", "c16", "U3", "S5", "M8[s]", "?"]
SHAPES = st.lists(st.sampled_from([0, 1, 3, 17]), max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=5), st.sampled_from([700, 5000, 1 << 23]))
def test_numpy_opens_archives_and_they_are_read_back(kinds: list[tuple[tuple[int, ...], str]], room_bytes: int) -> None:
    arrays = [np.zeros(shape, dtype) for shape, dtype in kinds]
    for array in arrays:
        array.reshape(-1).view(np.uint8)[:] = np.arange(array.nbytes) % 2
    data = bytes_of(archive_of(*arrays), room_bytes)
    found = np.load(io.BytesIO(data), allow_pickle=False)
    again = read(data)
    for number, array in enumerate(arrays):
        for one in (found[str(number)], again[str(number)]):
            assert (one.dtype, one.shape, one.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_large_arrays_have_64_bit_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz, "LONG_BYTES", 1000)
    data = bytes_of(archive_of(np.arange(300.0), np.arange(3.0)))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    assert np.load(io.BytesIO(data))["0"].tolist() == list(range(300))
    assert read(data)["1"].tolist() == [0, 1, 2]


def test_types_that_numpy_lacks_are_stored_as_bytes_and_restored() -> None:
    array = np.arange(5).astype(ml_dtypes.bfloat16)
    data = bytes_of(archive_of(array))
    assert np.load(io.BytesIO(data))["0"].view(np.uint16).tolist() == array.view(np.uint16).tolist()
    assert read(data)["0"].dtype == array.dtype


def test_a_comment_that_does_not_fit_the_type_is_ignored() -> None:
    data = bytes_of(archive_of(np.arange(5).astype(ml_dtypes.bfloat16)))
    assert read(data.replace(b"forged:bfloat16", b"forged:float128"))["0"].dtype == np.dtype("V2")
    assert read(data.replace(b"forged:bfloat16", b"forged:\xff\xff\xff\xff\xff\xff\xff\xff"))["0"].dtype == np.dtype(
        "V2"
    )


def saved(compressed: bool = False, **arrays: Any) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize("compressed", [False, True])
def test_every_corrupt_byte_of_an_array_is_refused(compressed: bool) -> None:
    data = saved(compressed, x=np.arange(40, dtype=np.uint8))
    for location in range(60, len(data) - 90):
        damaged = bytearray(data)
        damaged[location] ^= 0x10
        with suppress(CheckpointException):
            assert read(bytes(damaged))["x"].tolist() == list(range(40))


@pytest.mark.parametrize("compressed", [False, True])
def test_a_truncated_archive_is_refused(compressed: bool) -> None:
    data = saved(compressed, x=np.arange(100.0))
    for length in range(0, len(data), 13):
        invalid_file(data[:length])


def zipped(name: str, data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return file.getvalue()


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode() + b"\n"
    length = len(text).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + length + text + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no npy",
        b"\x93NUMPY",
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}", bytes(15)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}", bytes(17)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}", bytes(8)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,) * 9**9}", bytes(8)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (9223372036854775807, 9223372036854775807, 9)}"),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}", bytes(8)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': " + str((1,) * 40) + "}", bytes(8)),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
        npy("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,)}", bytes(8)),
        npy("{'descr': __import__('os').getpid(), 'fortran_order': False, 'shape': (1,)}", bytes(8)),
        npy("{'descr': '<f8', 'shape': (1,)}", bytes(8)),
        npy("[" * 5000),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}", bytes(8), b"\x09\x00"),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}" + " " * 60_000, bytes(8)),
    ],
)
def test_a_member_that_is_not_an_array_is_refused(data: bytes) -> None:
    invalid_file(zipped("x.npy", data))


def test_two_arrays_of_one_name_are_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("x", "x.npy"):
            archive.writestr(name, npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}", bytes(8)))
    invalid_file(file.getvalue())


def test_a_large_compressed_array_takes_no_memory() -> None:
    """An array of 64 MiB in an archive of 64 KiB is unpacked into a file."""
    data = saved(True, x=np.zeros(8 << 20))
    assert len(data) < 1 << 17
    storage = MemoryStorage()
    storage.publish("x.npz", data)
    tracemalloc.start()
    try:
        with open_npz(storage, "x.npz", CancelToken()):
            assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_a_wrong_size_is_refused_before_unpacking() -> None:
    header = npy("{'descr': '<f8', 'fortran_order': False, 'shape': (100000000000,)}", bytes(8))
    error = invalid_file(zipped("x.npy", header))
    assert "do not match its shape" in error.message
