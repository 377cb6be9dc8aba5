"""Reads traces from CSV: lifetimes of buffers, and logs of RMM, the memory manager of RAPIDS.

Invariants:
- An error names the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from forged.memory.traces.errors import TraceInvalid, file_invalid, too_large
from forged.memory.traces.live_buffers import BUFFERS_MAX, LiveBuffers
from forged.memory.traces.model import Buffer

LIFETIME_COLUMNS = ("id", "lower", "upper", "size")
RMM_COLUMNS = ("Thread", "Time", "Action", "Pointer", "Size", "Stream")
_NUMBER = re.compile("-?[0-9]{1,30}")
_ADDRESS = re.compile("(0x)?[0-9a-fA-F]{1,16}|\\(nil\\)")
SHOWN_CHARS = 60


def columns_of(line: str) -> list[str]:
    return [name.strip() for name in line.split(",")]


def read_lifetimes(lines: Iterable[str]) -> list[Buffer]:
    """The buffers of a file with the columns id, lower, upper and size, in any order.

    A column `offset` is left out of account; other ones, such as alignments and gaps of minimalloc, are refused.
    """
    buffers: list[Buffer] = []
    ids: dict[str, int] = {}
    for number, place, row in _rows(lines, LIFETIME_COLUMNS, optional=("offset",)):
        if len(buffers) >= BUFFERS_MAX:
            raise too_large(place, "buffers", BUFFERS_MAX)
        name = row["id"]
        if not name or ids.setdefault(name, number) != number:
            problem = f"the id {name[:SHOWN_CHARS]!r} is that of line {ids[name]} too" if name else "the id is empty"
            raise file_invalid(place, problem, "give each buffer an id of its own")
        lower, upper, size = (_integer(place, column, row[column]) for column in LIFETIME_COLUMNS[1:])
        try:
            buffers.append(Buffer(int(name) if _is_plain(name) else name, lower, upper, size))
        except TraceInvalid as error:
            raise file_invalid(place, error.message, "correct the line") from None
    return buffers


def read_rmm_log(lines: Iterable[str]) -> list[Buffer]:
    """The buffers of a log that `rmm.enable_logging` has written; failed allocations are left out."""
    live = LiveBuffers()
    for _, place, row in _rows(lines, RMM_COLUMNS):
        action = row["Action"]
        if action not in ("allocate", "free", "allocate failure"):
            problem = f"Action must be allocate, free or allocate failure, got {action[:SHOWN_CHARS]!r}"
            raise file_invalid(place, problem, "correct the line")
        if action == "allocate failure":
            continue
        size = _integer(place, "Size", row["Size"])
        if size < 0:
            raise file_invalid(place, f"Size must be at least 0, got {size}", "correct the line")
        address = _address(place, row["Pointer"])
        (live.allocate if action == "allocate" else live.release)(place, address, size)
    return live.buffers()


def _rows(
    lines: Iterable[str], wanted: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, str, dict[str, str]]]:
    """The number of each line, its place in words, and its values by column; empty lines are left out."""
    columns: list[str] = []
    for number, line in enumerate(lines, 1):
        place = f"line {number}"
        if not line.strip():
            continue
        values = columns_of(line)
        if not columns:
            columns = values
            _check_columns(place, columns, wanted, optional)
            continue
        if len(values) != len(columns):
            problem = f"there are {len(values)} values, and {len(columns)} columns"
            raise file_invalid(place, problem, "the file may be cut off: correct or remove the line")
        yield number, place, dict(zip(columns, values, strict=True))


def _check_columns(place: str, columns: Sequence[str], wanted: Sequence[str], optional: Sequence[str]) -> None:
    header = ",".join(columns)
    if missing := [name for name in wanted if columns.count(name) != 1]:
        raise file_invalid(
            place, f"column {missing[0]} must be there once, got {header[:SHOWN_CHARS]!r}", "correct the header"
        )
    if others := [name for name in columns if name not in wanted and name not in optional]:
        problem = f"unknown column {others[0][:SHOWN_CHARS]!r}; the known ones are {', '.join((*wanted, *optional))}"
        raise file_invalid(place, problem, "remove the column if the packing does not depend on it")


def _integer(place: str, column: str, text: str) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise file_invalid(place, f"{column} must be an integer, got {text[:SHOWN_CHARS]!r}", "correct the line")
    return int(text)


def _address(place: str, text: str) -> int:
    if _ADDRESS.fullmatch(text) is None:
        raise file_invalid(place, f"Pointer must be an address, got {text[:SHOWN_CHARS]!r}", "correct the line")
    return 0 if text == "(nil)" else int(text, 16)


def _is_plain(name: str) -> bool:
    """Whether the text is the plain form of an integer, so that no two texts become one id."""
    return _NUMBER.fullmatch(name) is not None and str(int(name)) == name
