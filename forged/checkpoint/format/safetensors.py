"""The safetensors format: a header that says what follows, and the arrays without anything between them.

Law: what this writes, the `safetensors` library opens; what it reads is checked in every number before anything is
allocated for it. The arrays of a file fill it: none shares a byte with another one, and no byte belongs to none.
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
"""The library's own limit."""
SIZE_MAX = 1 << 60
_KNOWN = {there: name for name, there in SAFETENSORS.items()} | {
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""What a manifest calls the types of the format; others have some that not every version of the library knows."""
_FIELDS = (b'"dtype"', b'"shape"', b'"data_offsets"')


class Entry(NamedTuple):
    """An array in a file."""

    name: str
    dtype: str
    """As a manifest calls it."""
    shape: Shape
    nbytes: int


class Header(NamedTuple):
    """What a file says of itself."""

    entries: list[Entry]
    """In the order in which they lie there."""
    starts: list[int]
    """Where each begins in the file."""
    metadata: dict[str, str]
    data_offset: int
    """Where the first begins."""


def encode_header(entries: Iterable[Entry], metadata: dict[str, str]) -> bytes:
    """What stands before the arrays, which lie in this order; it ends at the end of a page."""
    said: dict[str, object] = {METADATA: metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, nbytes in entries:
        known = safetensors_name(dtype)
        said[unique_name(name, said)] = {
            "dtype": known or RAW,
            "shape": shape if known else (nbytes,),
            "data_offsets": (offset, offset + nbytes),
        }
        offset += nbytes
    text = msgspec.json.encode(said)
    room = math.ceil((PLACE_BYTES + len(text)) / PAGE) * PAGE - PLACE_BYTES
    if room > HEADER_BYTES_MAX:
        raise invalid(
            f"the names and shapes of the arrays of one file take {len(text)} bytes, more than {HEADER_BYTES_MAX}",
            "use fewer arrays, or shorter keys",
        )
    return room.to_bytes(PLACE_BYTES, "little") + text.ljust(room)


def read_header(reader: Reader, file: str) -> Header:
    """What a file says of itself; refuses what is not so. Reads no more than the header."""
    if reader.size < PLACE_BYTES:
        _refuse(file, "it is too short")
    place = bytearray(PLACE_BYTES)
    reader.read_into(0, memoryview(place))
    length = int.from_bytes(place, "little")
    if length > min(HEADER_BYTES_MAX, reader.size - PLACE_BYTES):
        _refuse(file, f"its header is said to have {length} bytes")
    text = bytearray(length)
    reader.read_into(PLACE_BYTES, memoryview(text))
    return parse_header(bytes(text), reader.size - PLACE_BYTES - length, file)


def parse_header(text: bytes, data_bytes: int, file: str) -> Header:
    """What is said by a header behind which so many bytes follow."""
    metadata, names, said = _decoded(text, file)
    data_offset = PLACE_BYTES + len(text)
    order = sorted(range(len(said)), key=lambda number: said[number].data_offsets)
    entries, starts, at = [], [], 0
    for number in order:
        start, end = said[number].data_offsets
        if start != at:
            _refuse(file, f"{names[number][:80]!r} does not begin where the one before it ends")
        entries.append(_entry(names[number], said[number], file))
        starts.append(data_offset + start)
        at = end
    if at != data_bytes:
        _refuse(file, f"its arrays have {at} bytes, and {data_bytes} follow its header")
    return Header(entries, starts, metadata, data_offset)


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    """What a header says of an array."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _decoded(text: bytes, file: str) -> tuple[dict[str, str], list[str], list[_Said]]:
    """The metadata, the names, and what is said of each."""
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(METADATA, b"{}"), type=dict[str, str])
        said = msgspec.json.decode(b"[%s]" % b",".join(map(bytes, raw.values())), type=list[_Said])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        _refuse(file, f"its header is none: {error!s:.100}")
    _require_names_once(text, len(said), file)
    return metadata, list(raw), said


def _require_names_once(text: bytes, count: int, file: str) -> None:
    """Refuse a header that says something twice, because readers differ in what they take of it."""
    if b"\\u" not in text and all(text.count(field) == count for field in _FIELDS):
        return

    def once(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            _refuse(file, "its header says something twice")

    json.loads(text, object_pairs_hook=once)


def _entry(name: str, said: _Said, file: str) -> Entry:
    start, end = said.data_offsets
    dtype = _KNOWN.get(said.dtype)
    if dtype is None:
        raise CheckpointException(
            f"{file}: {name[:80]!r} is of the type {said.dtype[:20]!r}, which is not known here",
            file,
            ExceptionType.INCOMPATIBLE_VERSION,
            code="checkpoint_dtype_unknown",
            fix="convert it to a type of whole bytes with the tool that has written it",
        )
    if len(said.shape) > AXES_MAX or min(said.shape, default=0) < 0 or not 0 <= start <= end:
        _refuse(file, f"{name[:80]!r} has no possible shape or place")
    itemsize = dtype_of(dtype).itemsize
    if math.prod(max(1, size) for size in said.shape) * itemsize > SIZE_MAX:
        _refuse(file, f"{name[:80]!r} is too large to be true")
    if math.prod(said.shape) * itemsize != end - start:
        _refuse(file, f"{name[:80]!r} has {end - start} bytes, which are not those of its shape")
    return Entry(name, dtype, tuple(said.shape), end - start)


def unique_name(name: str, taken: Container[str]) -> str:
    """A name that no other array in the file has, nor its metadata."""
    found, number = name, 2
    while found in taken or found == METADATA:
        found, number = f"{name} ({number})", number + 1
    return found


def _refuse(file: str, why: str) -> NoReturn:
    raise corrupted(
        f"{file} is no safetensors file that can be read: {why}",
        file,
        "use another copy",
        code="checkpoint_header_malformed",
    ) from None
