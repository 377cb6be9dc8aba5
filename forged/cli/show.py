"""How the daemon's answers look to people.

Law: units are in the names of the fields, so they need no other description: `_s` is shown as a duration and `_at` as a
time of day. What comes from elsewhere never reaches the terminal as control characters. Colour is only for terminals,
and not for those who set NO_COLOR.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

BOLD, DIM, YELLOW = "1", "2", "33"
NONE = "-"
JOB_WIDTH = 8
TYPE_WIDTH = 16


def pairs(value: Row) -> None:
    """One thing, a line for each of its fields."""
    labels = [_label(key) for key in value]
    width = max(map(len, labels), default=0)
    for label, (key, one) in zip(labels, value.items(), strict=True):
        print(f"{_paint(f'{label:<{width}}', DIM)}  {field(key, one)}")


def table(rows: Sequence[Row], columns: Sequence[str], nothing: str) -> None:
    """Several things, a line for each; numbers to the right. `nothing` is said where there are none."""
    if not rows:
        print(nothing)
        return
    cells = [[field(column, row[column]) for column in columns] for row in rows]
    labels = [_label(column) for column in columns]
    widths = [max(map(len, column)) for column in zip(labels, *cells, strict=True)]
    numeric = [all(_is_number(row[column]) for row in rows) and not column.endswith("_at") for column in columns]
    print(_paint(_line(labels, widths, numeric), BOLD))
    for line in cells:
        print(_line(line, widths, numeric))


def event(record: Row, *, depth: int = 0, mark: str = "") -> None:
    """A fact or a gap in one line; `depth` is how far it is from the first cause."""
    if "gap" in record:
        gap = record["gap"]
        print(_paint(f"-- facts {gap['first']} to {gap['last']} are missing: {plain(gap['reason'])}", YELLOW))
        return
    place = (
        f"{mark}{record['id']:>{8 - len(mark)}}  {moment(record['at'])}  {plain(record['job']) or NONE:<{JOB_WIDTH}}"
    )
    kind = _paint(f"{'  ' * depth}{plain(record['type']):<{TYPE_WIDTH}}", BOLD)
    why = f"{record['origin']}, because of {record['cause']}" if record["cause"] else record["origin"]
    print(f"{place}  {kind}  {_fields(record['fact'])}  {_paint(f'({plain(why)})', DIM)}")


def story(records: Sequence[Row], marked: int) -> None:
    """Facts below what caused them."""
    depths: dict[int, int] = {}
    for record in records:
        depth = depths[record["id"]] = depths.get(record["cause"], -1) + 1
        event(record, depth=depth, mark=">" if record["id"] == marked else "")


def field(key: str, value: Any) -> str:
    """A field's value in the words for its unit."""
    if value is None or value in ([], {}):
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return duration(value) if key.endswith("_s") else moment(value) if key.endswith("_at") else f"{value}"
    if isinstance(value, dict):
        return f"{{{_fields(value)}}}"
    if isinstance(value, list):
        return ", ".join(field("", one) for one in value)
    return plain(str(value))


def duration(seconds: float) -> str:
    """About how long, in the unit that people would use."""
    if seconds <= 0:
        return NONE
    for factor, unit, limit in ((1e6, "µs", 999.5), (1e3, "ms", 999.5), (1.0, "s", 59.95)):
        if seconds * factor < limit:
            return f"{seconds * factor:.3g} {unit}"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest_s:02}s"


def moment(at: float) -> str:
    """A wall clock's time here."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def plain(text: str) -> str:
    """The text without what a terminal would obey."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _fields(value: Row) -> str:
    return " ".join(f"{plain(name)}={_quoted(name, one)}" for name, one in value.items())


def _quoted(key: str, value: Any) -> str:
    text = field(key, value)
    return f'"{text}"' if isinstance(value, str) and (not text or " " in text) else text


def _label(key: str) -> str:
    return plain(key).removesuffix("_s").removesuffix("_at")


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    aligned = (
        f"{cell:>{width}}" if right else f"{cell:<{width}}"
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    )
    return "  ".join(aligned).rstrip()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _paint(text: str, colour: str) -> str:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty():
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"
