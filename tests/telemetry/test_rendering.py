"""Rendering of events with arbitrary fields as JSON and as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.telemetry.rendering import LINE_BYTES_MAX, PrettyFormatter, to_json, visible

HEAD = {"timestamp": "2026-01-31T12:00:00.000Z", "level": "info", "event": "something"}
EVIL = "\x1b]0;owned\x07\x1b[2J\r\nsecond line\x9b31m\u202egnp.exe\x7f\u2028"


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def endless() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(100_000):
        made = [made]
    return made


ODD: Mapping[str, Any] = {
    "bytes": b"\x00\xff",
    "set": {1},
    "tuple keys": {(1, 2): 3},
    "lone surrogate": "\ud800",
    "not a number": float("nan"),
    "infinite": float("inf"),
    "large": 2**200,
    "object": object(),
    "unshowable": Unshowable(),
    "endless": endless(),
    "deep": deep(),
    "exception": ValueError("\x1b"),
}


@pytest.mark.parametrize("name", ODD)
def test_json_is_rendered_for_any_field_value(name: str) -> None:
    line = to_json(HEAD | {"odd": ODD[name], "sound": "yes"})
    read = json.loads(line)
    assert read["event"] == "something"
    assert read["sound"] == "yes"
    assert "odd" in read


@pytest.mark.parametrize("name", ODD)
def test_text_is_rendered_for_any_field_value(name: str) -> None:
    line = PrettyFormatter(colours=False)(HEAD | {"odd": ODD[name], "sound": "yes"}).decode()
    assert "something" in line
    assert "sound=yes" in line


@pytest.mark.parametrize("field", ["event", "reason", "exception"])
def test_json_escapes_control_characters_without_loss(field: str) -> None:
    line = to_json(HEAD | {field: EVIL})
    assert all(one.isprintable() for one in line.decode())
    assert json.loads(line)[field] == EVIL


@pytest.mark.parametrize("field", ["event", "reason"])
@pytest.mark.parametrize("value", [EVIL, {"nested": EVIL}, [EVIL]])
def test_untrusted_text_cannot_control_the_terminal_or_begin_a_line(field: str, value: Any) -> None:
    line = PrettyFormatter(colours=False)(HEAD | {field: value}).decode()
    assert all(one.isprintable() for one in line)


def test_traceback_lines_cannot_be_mistaken_for_events() -> None:
    forged = "Traceback:\n\x1b[31mboom\n2026-01-31T12:00:00.000Z [error] the store is on fire"
    first, *rest = PrettyFormatter(colours=False)(HEAD | {"exception": forged}).decode().splitlines()
    assert "something" in first
    assert len(rest) == 3
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_colours_are_used_only_if_enabled() -> None:
    assert b"\x1b[" in PrettyFormatter(colours=True)(HEAD)
    assert b"\x1b" not in PrettyFormatter(colours=False)(HEAD)


def test_text_keeps_the_order_of_fields() -> None:
    line = PrettyFormatter(colours=False)(HEAD | {"z": 1, "a": "two words", "m": ""}).decode()
    assert line.endswith("z=1 a='two words' m=''")


@pytest.mark.parametrize("size", [LINE_BYTES_MAX, 1 << 20])
@pytest.mark.parametrize("filling", ["x", "\x1b", "é", "\U0001f525"])
def test_long_json_line_is_cut_and_stays_valid(size: int, filling: str) -> None:
    line = to_json(HEAD | {"short": "whole", "long": filling * size, "nested": {"a": [filling * size]}})
    read = json.loads(line)
    assert len(line) <= 48 << 10
    assert read["short"] == "whole"
    assert f"({size} characters)" in read["long"]


def test_many_long_fields_are_cut_too() -> None:
    event = HEAD | {f"field {index}": "y" * 10_000 for index in range(200)}
    assert len(to_json(event)) <= 48 << 10
    assert len(PrettyFormatter(colours=False)(event)) <= 48 << 10


@settings(max_examples=50)
@given(st.dictionaries(st.text(), st.recursive(st.text() | st.binary() | st.floats(), st.lists)))
def test_any_fields_make_one_printable_line(fields: dict[str, Any]) -> None:
    for line in (to_json(fields | HEAD), PrettyFormatter(colours=False)({"exception": ""} | fields | HEAD)):
        first = line.decode().split("\n")[0]
        assert "\x1b" not in first
        assert "\x9b" not in first


@given(st.text())
def test_visible_text_is_printable_and_keeps_printable_text(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(text) == text or not text.isprintable()
