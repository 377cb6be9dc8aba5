"""The safetensors format: a header that describes the arrays, followed by the arrays.

Invariants:
- The `safetensors` library opens every file written here.
- Every number that is read is checked before memory is allocated for it.
- The arrays fill the file: they do not overlap, and every byte belongs to one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from forged.checkpoint.errors import CheckpointException, ExceptionType, corrupted, invalid
from forged.checkpoint.format.boxes import Shape
from forged.checkpoint.format.dtypes import RAW, SAFETENSORS, dtype_of, safetensors_name
from forged.checkpoint.model import AXES_MAX

if TYPE_CHECKING:
    from forged.checkpoint.ports import Reader

PAGE = 4096
PLACE_BYTES = 8
METADATA = "__metadata__"
HEADER_BYTES_MAX = 100_000_000
"""The limit of the `safetensors` library."""
SIZE_MAX = 1 << 60
_KNOWN = {there: name for name, there in SAFETENSORS.items()} | {
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""The manifest's names for the format's types, including some that not every version of the library knows."""
_FIELDS = (b'"dtype"', b'"shape"', b'"data_offsets"')


class TensorEntry(NamedTuple):
    """An array in a file."""

    name: str
    dtype: str
    """The manifest's name of the type."""
    shape: Shape
    nbytes: int


class Header(NamedTuple):
    """The header of a file."""

    entries: list[TensorEntry]
    """In file order."""
    starts: list[int]
    """By entry, its offset in the file."""
    metadata: dict[str, str]
    data_offset: int
    """The offset of the first array."""


def encode_header(entries: Iterable[TensorEntry], metadata: dict[str, str]) -> bytes:
    """The header for arrays in this order, padded to a whole number of pages."""
    described: dict[str, object] = {METADATA: metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, nbytes in entries:
        known = safetensors_name(dtype)
        described[unique_name(name, described)] = {
            "dtype": known or RAW,
            "shape": shape if known else (nbytes,),
            "data_offsets": (offset, offset + nbytes),
        }
        offset += nbytes
    text = msgspec.json.encode(described)
    padded = math.ceil((PLACE_BYTES + len(text)) / PAGE) * PAGE - PLACE_BYTES
    if padded > HEADER_BYTES_MAX:
        raise invalid(
            f"the names and shapes of a file's arrays take {len(text)} bytes; limit {HEADER_BYTES_MAX}",
            "use fewer arrays, or shorter keys",
        )
    return padded.to_bytes(PLACE_BYTES, "little") + text.ljust(padded)


def read_header(reader: Reader, file: str) -> Header:
    """Read and check the header of a file; reads nothing else."""
    if reader.size < PLACE_BYTES:
        _refuse(file, "it is too short")
    place = bytearray(PLACE_BYTES)
    reader.read_into(0, memoryview(place))
    length = int.from_bytes(place, "little")
    if length > min(HEADER_BYTES_MAX, reader.size - PLACE_BYTES):
        _refuse(file, f"it declares a header of {length} bytes")
    text = bytearray(length)
    reader.read_into(PLACE_BYTES, memoryview(text))
    return parse_header(bytes(text), reader.size - PLACE_BYTES - length, file)


def parse_header(text: bytes, data_bytes: int, file: str) -> Header:
    """Check a header that `data_bytes` bytes follow."""
    metadata, names, described = _decoded(text, file)
    data_offset = PLACE_BYTES + len(text)
    order = sorted(range(len(described)), key=lambda number: described[number].data_offsets)
    entries, starts, at = [], [], 0
    for number in order:
        start, end = described[number].data_offsets
        if start != at:
            _refuse(file, f"{names[number][:80]!r} does not begin where the previous array ends")
        entries.append(_entry(names[number], described[number], file))
        starts.append(data_offset + start)
        at = end
    if at != data_bytes:
        _refuse(file, f"its arrays have {at} bytes, and {data_bytes} follow its header")
    return Header(entries, starts, metadata, data_offset)


class _ArrayHeader(msgspec.Struct, forbid_unknown_fields=True):
    """The header's description of one array."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _decoded(text: bytes, file: str) -> tuple[dict[str, str], list[str], list[_ArrayHeader]]:
    """The metadata, the names and the description of each array."""
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(METADATA, b"{}"), type=dict[str, str])
        described = msgspec.json.decode(b"[%s]" % b",".join(map(bytes, raw.values())), type=list[_ArrayHeader])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        _refuse(file, f"its header is malformed: {error!s:.100}")
    _require_names_once(text, len(described), file)
    return metadata, list(raw), described


def _require_names_once(text: bytes, count: int, file: str) -> None:
    """Refuse a header with duplicate keys, because readers differ in which value they take."""
    if b"\\u" not in text and all(text.count(field) == count for field in _FIELDS):
        return

    def once(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            _refuse(file, "its header has a duplicate key")

    json.loads(text, object_pairs_hook=once)


def _entry(name: str, described: _ArrayHeader, file: str) -> TensorEntry:
    start, end = described.data_offsets
    dtype = _KNOWN.get(described.dtype)
    if dtype is None:
        raise CheckpointException(
            f"{file}: {name[:80]!r} is of the type {described.dtype[:20]!r}, which is unknown",
            file,
            ExceptionType.INCOMPATIBLE_VERSION,
            code="checkpoint_dtype_unknown",
            fix="convert it to a type of whole bytes with the tool that wrote it",
        )
    if len(described.shape) > AXES_MAX or min(described.shape, default=0) < 0 or not 0 <= start <= end:
        _refuse(file, f"{name[:80]!r} has an invalid shape or offset")
    itemsize = dtype_of(dtype).itemsize
    if math.prod(max(1, size) for size in described.shape) * itemsize > SIZE_MAX:
        _refuse(file, f"{name[:80]!r} has more than {SIZE_MAX} bytes")
    if math.prod(described.shape) * itemsize != end - start:
        _refuse(file, f"{name[:80]!r} has {end - start} bytes, which does not match its shape")
    return TensorEntry(name, dtype, tuple(described.shape), end - start)


def unique_name(name: str, taken: Container[str]) -> str:
    """The name, changed if it is taken or reserved."""
    found, number = name, 2
    while found in taken or found == METADATA:
        found, number = f"{name} ({number})", number + 1
    return found


def _refuse(file: str, why: str) -> NoReturn:
    raise corrupted(
        f"{file} is not a valid safetensors file: {why}",
        file,
        "use another copy",
        code="checkpoint_header_malformed",
    ) from None
