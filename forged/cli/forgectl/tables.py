"""Text output: tables, fields and facts.

Invariants:
- The name of a field gives its unit: `_s` is shown as a duration and `_at` as a time.
- A field that the daemon did not send is shown like an empty one.
- Values from outside never reach the terminal as control characters.
- Colours, cut cells and wrapped lines are used only on a terminal; NO_COLOR disables colours.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from forged.cli.process import plain

Row = Mapping[str, Any]
InWords = Callable[[Any, dict[str, Any]], str | None]
"""Turns a fact into a sentence; None if there is none for its type."""

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"
NONE = "-"
CUT = "…"
CELL_WIDTH_MIN = 8
NESTED_MAX = 32
NAMES_MAX = 8
FIGURES_MAX = 12
FIGURES_READ = 6
COLUMN_GAP = 2
_STATE_COLOURS = {
    "active": GREEN, "disabled": YELLOW, "quarantined": RED, "refused": RED,
    "joining": YELLOW, "rescaling": YELLOW, "leaving": YELLOW, "failed": RED,
    "canary": YELLOW, "production": GREEN, "deprecated": DIM, "archived": DIM,
    "forming": YELLOW, "running": GREEN, "waiting": RED, "completed": GREEN, "aborted": RED,
}  # fmt: skip
_STATES = frozenset({"state", "status", "phase"})
_ADDRESS = frozenset({"id", "hostname", "port"})
JOB_WIDTH = 8
TYPE_WIDTH = 20
HANGING = 10
"""Indentation of the wrapped lines of a fact."""
NOTE_INDENT = 2
WRAPPED_MIN = 20
"""Lines are not wrapped if fewer columns than this are left."""
_WORD = re.compile(r" *[^ ]+")
_PAINT = re.compile(r"\x1b\[\d+m")


def pairs(value: Row) -> None:
    """Print one entity, a line for each field."""
    labels = [_label(key) for key in value]
    width = max(map(len, labels), default=0)
    for label, (key, one) in zip(labels, value.items(), strict=True):
        shown = paint(field(key, one) or NONE, _colour(key, one))
        print_wrapped(f"{paint(f'{label:<{width}}', DIM)}  {shown}", width + COLUMN_GAP)


def table(
    rows: Sequence[Row], columns: Sequence[str], nothing: str, *, yielding: Sequence[str] = (), kept: str = ""
) -> None:
    """Print a table, or `nothing` if it has no rows; numbers are right-aligned.

    If a line does not fit, the `yielding` columns are cut or omitted first, in order; the column `kept` is cut last.
    """
    if not rows:
        print(nothing)
        return
    cells = {column: [field(column, row.get(column)) for row in rows] for column in columns}
    numeric = {column for column in columns if _is_numeric(column, rows)}
    widths = {column: max(map(_width, [_label(column), *cells[column]])) for column in columns}
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns
        widths = _shrunk(widths, numeric, room, yielding)
        widths = _fit(widths, numeric | {kept}, room)
        widths = _fit(widths, numeric, room)
    print(paint(_line([(_label(column), "") for column in widths], widths, numeric), BOLD))
    for at, row in enumerate(rows):
        print(_line([(cells[column][at], _colour(column, row.get(column))) for column in widths], widths, numeric))


def notes(reply: Row) -> None:
    """Print the notes that a reply carries in `remarks`."""
    remarks = reply.get("remarks")
    for remark in remarks if isinstance(remarks, list) else []:
        print_wrapped(f"note: {field('', remark)}", NOTE_INDENT)


def anything(value: Any) -> None:
    """Print the reply of a plugin: a map, a list or a scalar."""
    if isinstance(value, dict) and value:
        pairs({_text(key): one for key, one in value.items()})
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        rows = [{_text(key): one for key, one in row.items()} for row in value]
        table(rows, list(dict.fromkeys(key for row in rows for key in row)), NONE)
    elif isinstance(value, list):
        for one in value:
            print(field("", one))
    elif value not in (None, {}, ""):
        print(field("", value))


def event(record: Row, in_words: InWords = lambda kind, fact: None, *, depth: int = 0, mark: str = "") -> None:
    """Print a fact or a gap in one line; `depth` is its distance from the first cause."""
    if isinstance(record.get("gap"), dict):
        gap = record["gap"]
        reason = field("", gap.get("reason"))
        print_wrapped(paint(f"-- facts {gap.get('first')} to {gap.get('last')} missing: {reason}", YELLOW))
        return
    number, job, kind, origin = (field("", record.get(key)) or NONE for key in ("id", "job", "type", "origin"))
    place = f"{mark}{number:>{8 - len(mark)}}  {field('at_at', record.get('at'))}  {job:<{JOB_WIDTH}}"
    kind = paint(f"{'  ' * depth}{kind:<{TYPE_WIDTH}}", BOLD)
    why = f"{origin}, caused by {field('', record['cause'])}" if record.get("cause") else origin
    fact = record.get("fact")
    text = in_words(record.get("type"), fact) or fields(fact) if isinstance(fact, dict) else field("", fact)
    print_wrapped(f"{place}  {kind}  {text}  {paint(f'({why})', DIM)}")


def story(records: Sequence[Row], marked: int, in_words: InWords = lambda kind, fact: None) -> None:
    """Print facts, each below its cause."""
    depths: dict[str, int] = {}
    for record in records:
        depth = depths[f"{record.get('id')}"] = depths.get(f"{record.get('cause', 0)}", -1) + 1
        event(record, in_words, depth=depth, mark=">" if record.get("id") == marked else "")


def field(key: str, value: Any, depth: int = 0) -> str:
    """A field's value with its unit; deeply nested parts are left out."""
    if value is None or value in ([], {}):
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return duration(value) if key.endswith("_s") else moment(value) if key.endswith("_at") else _number(value)
    if isinstance(value, bytes):
        return value.hex()
    if not isinstance(value, (dict, list)):
        return plain(str(value))
    if depth == NESTED_MAX:
        return CUT
    if isinstance(value, dict):
        return _address(value) or f"{{{fields(value, depth + 1)}}}"
    return ", ".join(field("", one, depth + 1) for one in value)


def _number(value: float) -> str:
    """A number without the rounding noise of float arithmetic."""
    text = f"{value}"
    return f"{value:.{FIGURES_MAX}g}" if isinstance(value, float) and len(text) > FIGURES_MAX + 2 else text


def names(values: Sequence[Any]) -> str:
    """The first names, and the number of further ones."""
    shown = field("", list(values[:NAMES_MAX]))
    return shown if len(values) <= NAMES_MAX else f"{shown} and {len(values) - NAMES_MAX:,} more"


def duration(seconds: float) -> str:
    """A duration, rounded, in a readable unit."""
    if seconds <= 0:
        return NONE
    if not seconds < float("inf"):
        return f"{seconds}"
    for factor, unit, limit in ((1e6, "µs", 999.5), (1e3, "ms", 999.5), (1.0, "s", 59.95)):
        if seconds * factor < limit:
            return f"{seconds * factor:.3g} {unit}"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest_s:02}s"


def size(count: int) -> str:
    """A number of bytes, rounded, in a readable unit."""
    for factor, unit in ((1, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB")):
        if count / factor < 999.5:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e12:,.1f} TB"


def counted(count: int, what: str) -> str:
    """A count with its noun: `1 worker`, `2,000 workers`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def rounded(value: float | None) -> float | None:
    """A number rounded to few digits."""
    return None if value is None else float(f"{value:.{FIGURES_READ}g}")


def bar(part: float, width: int) -> str:
    """A progress bar."""
    filled = int(width * min(1.0, max(0.0, part)))
    return f"[{'#' * filled}{'-' * (width - filled)}]"


def paint(text: str, colour: str) -> str:
    """The text in a colour, if colours are enabled."""
    if not colour or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty():
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def print_wrapped(line: str, indent: int = HANGING) -> None:
    """Print a line; on a terminal it is wrapped between words, with `indent` before each further line."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print(line if columns < WRAPPED_MIN + indent else "".join(_broken(line, columns, " " * indent)))


def _broken(line: str, columns: int, indent: str) -> Iterator[str]:
    used = 0
    for word in _WORD.findall(line):
        width = _width(_PAINT.sub("", word))
        if used > len(indent) and used + width > columns:
            word = word.lstrip(" ")
            used, width = len(indent), _width(_PAINT.sub("", word))
            yield f"\n{indent}"
        used += width
        yield word


def moment(at: float) -> str:
    """A local time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return f"{at}"  # outside the range of the calendar


def fields(value: Row, depth: int = 0) -> str:
    """The fields of a map in one line."""
    return " ".join(f"{plain(_text(key))}={_quoted(_text(key), value[key], depth)}" for key in value)


def _address(value: Row) -> str:
    """A worker as `id@hostname:port`; empty for any other map."""
    if value.keys() != _ADDRESS or any(isinstance(one, (dict, list)) for one in value.values()):
        return ""
    return plain(f"{value['id']}@{value['hostname']}:{value['port']}")


def _quoted(key: str, value: Any, depth: int) -> str:
    text = field(key, value, depth)
    return f'"{text}"' if isinstance(value, str) and (not text or " " in text) else text


def _label(key: str) -> str:
    return plain(key).removesuffix("_s").removesuffix("_at")


def _line(cells: Sequence[tuple[str, str]], widths: Mapping[str, int], numeric: Collection[str]) -> str:
    *others, last = (
        _cell(cell, width, colour, to_the_right=column in numeric)
        for (cell, colour), (column, width) in zip(cells, widths.items(), strict=True)
    )
    return (" " * COLUMN_GAP).join([*others, last.rstrip()]).rstrip()


def _cell(text: str, width: int, colour: str, *, to_the_right: bool) -> str:
    text = _cut(text, width)
    room = " " * (width - _width(text))
    return room + paint(text, colour) if to_the_right else paint(text, colour) + room


def _shrunk(widths: Mapping[str, int], numeric: Collection[str], room: int, yielding: Sequence[str]) -> dict[str, int]:
    """The widths after cutting or omitting the yielding columns."""
    fitting = dict(widths)
    for column in yielding:
        excess = _excess(fitting, room)
        if excess <= 0 or column not in fitting:
            continue
        least = fitting[column] if column in numeric else CELL_WIDTH_MIN
        if fitting[column] - excess >= least:
            fitting[column] -= excess
        else:
            del fitting[column]
    return fitting


def _fit(widths: Mapping[str, int], rigid: Collection[str], room: int) -> dict[str, int]:
    """The widths with which a line fits: the widest columns that are not rigid are cut, down to a minimum."""
    text = [column for column in widths if column not in rigid]
    fitting = {column: min(width, room) if column in text else width for column, width in widths.items()}
    while text and _excess(fitting, room) > 0:
        widest = max(text, key=fitting.__getitem__)
        if fitting[widest] <= CELL_WIDTH_MIN:
            break
        fitting[widest] -= 1
    return fitting


def _excess(widths: Mapping[str, int], room: int) -> int:
    """The number of columns by which a line is too long."""
    return sum(widths.values()) + COLUMN_GAP * (len(widths) - 1) - room


def _cut(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    kept, room = "", width - 1
    for one in text:
        room -= _width(one)
        if room < 0:
            break
        kept += one
    return kept + CUT


def _width(text: str) -> int:
    """The number of terminal columns of a text."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(2 if east_asian_width(one) in "WF" else 0 if combining(one) else 1 for one in text)


def _colour(key: str, value: Any) -> str:
    if key in _STATES:
        return _STATE_COLOURS.get(f"{value}", "")
    return RED if value and key in ("problem", "quarantined") else ""


def _is_numeric(column: str, rows: Sequence[Row]) -> bool:
    values = [row.get(column) for row in rows]
    return not column.endswith("_at") and any(map(_is_number, values)) and all(map(_is_number_or_none, values))


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(key: Any) -> str:
    return key if isinstance(key, str) else field("", key)
