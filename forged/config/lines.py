"""Finds the line of each key in a TOML text.

Invariants:
- The line of a key is that of the statement that sets it. `tomllib` reports no positions, so lines are added to a
  statement until `tomllib` parses it; text within strings and lists is never taken for a key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

PARSED_CHARS_MAX = 1 << 20
"""The most text that is parsed to find lines, because each added line parses its statement again. Later keys have no
line."""
DEPTH_MAX = 16
"""The depth to which keys are found; deeper keys have the line of their table."""


class _Statement(NamedTuple):
    line: int
    text: str
    parsed: dict[str, Any] | None
    """None for an incomplete or invalid statement, which is the last."""


def key_lines(text: str) -> Mapping[str, int]:
    """The line, from 1, of each key of a valid text; keys are dotted paths."""
    lines: dict[str, int] = {}
    table = ""
    for statement in _statements(text):
        if statement.parsed is None:
            break
        header = statement.text.lstrip().startswith("[")
        paths = list(_paths(statement.parsed, "" if header else table, DEPTH_MAX))
        for path in paths:
            lines.setdefault(path, statement.line)
        if header:
            table = paths[-1]
    return lines


def invalid_line(text: str) -> int | None:
    """The first line of the first incomplete or invalid statement; None if there is none."""
    return next((statement.line for statement in _statements(text) if statement.parsed is None), None)


def _statements(text: str) -> Iterator[_Statement]:
    """The statements with their first lines, without blank lines and comments."""
    room = PARSED_CHARS_MAX
    begin, statement = 1, ""
    for number, line in enumerate(text.split("\n"), 1):
        statement += f"{line}\n"
        room -= len(statement)
        if room < 0:
            return
        parsed = _parsed(statement)
        if parsed is None:
            continue
        if parsed:
            yield _Statement(begin, statement, parsed)
        begin, statement = number + 1, ""
    if statement:
        yield _Statement(begin, statement, None)


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def _paths(value: object, path: str, depth: int) -> Iterator[str]:
    """The paths of all keys in a table, each table before its keys."""
    if isinstance(value, dict) and depth:
        for key, inner in value.items():
            inner_path = f"{path}.{key}" if path else key
            yield inner_path
            yield from _paths(inner, inner_path, depth - 1)
