"""Where in a TOML text each key is written.

Law: the line of a key is that of the statement that sets it. Python's parser tells no positions, but a statement by
itself is a valid text, and without its last line it is none; so the text is cut where the parser says that a statement
is complete, and what looks like a key within a string or a list never is one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

PARSED_CHARS_MAX = 1 << 20
"""How much text is parsed to find the lines: every line of a statement is parsed again with each one below it. Keys
that stand behind that have no line."""
DEPTH_MAX = 16
"""How deep keys are looked for; deeper ones have the line of the table that they are in."""


class _Statement(NamedTuple):
    line: int
    text: str
    parsed: dict[str, Any] | None
    """None for one that is not complete, or not valid: there can be only one, the last."""


def key_lines(text: str) -> Mapping[str, int]:
    """The lines, counted from 1, of the keys of a valid text; keys are dotted paths."""
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


def broken_line(text: str) -> int | None:
    """The line at which the first statement begins that is not complete or not valid; None where none was found."""
    return next((statement.line for statement in _statements(text) if statement.parsed is None), None)


def _statements(text: str) -> Iterator[_Statement]:
    """Every statement with the line at which it begins; blank lines and comments are none."""
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
    """The paths of all keys in a table, a table before what is in it."""
    if isinstance(value, dict) and depth:
        for key, inner in value.items():
            inner_path = f"{path}.{key}" if path else key
            yield inner_path
            yield from _paths(inner, inner_path, depth - 1)
