"""Formats log events as JSON or as aligned text.

Invariants:
- Every event gives one line of at most `LINE_BYTES_MAX`, for all values of its fields: a value that cannot be
  formatted is replaced by its type, and long fields are cut.
- Control and invisible characters are escaped, so that logged text cannot act on a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from structlog.dev import Column, ConsoleRenderer, KeyValueColumnFormatter, LogLevelColumnFormatter, plain_traceback

LINE_BYTES_MAX = 40 << 10
"""Below the 48 KiB at which journald splits lines."""

_BRIGHT, _DIM, _RED, _GREEN, _YELLOW, _CYAN, _PLAIN = (f"\x1b[{code}m" for code in (1, 2, 31, 32, 33, 36, 0))
_LEVEL_STYLES = {"debug": _DIM, "info": _GREEN, "warning": _YELLOW, "error": _RED}
_EVENT_WIDTH = 30

_UNSEEN = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
"""Characters that JSON allows and that act on a terminal or are invisible."""


def to_json(event: Mapping[str, Any]) -> bytes:
    """One JSON object on a line."""
    try:
        encoded = _encode(event)
    except Exception:  # noqa: BLE001 - a field's own code may raise anything, and logging must not
        encoded = b""
    if not 0 < len(encoded) <= LINE_BYTES_MAX:
        encoded = _cut(event)
    if encoded.isascii() and b"\x7f" not in encoded:
        return encoded
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded.decode()).encode()


def visible(text: str) -> str:
    """The text with unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class PrettyFormatter:
    """Aligned columns, optionally coloured; a traceback follows on indented lines."""

    def __init__(self, *, colours: bool) -> None:
        plain, bright, dim, cyan = (_PLAIN, _BRIGHT, _DIM, _CYAN) if colours else ("", "", "", "")
        levels = _LEVEL_STYLES if colours else dict.fromkeys(_LEVEL_STYLES, "")
        self._render = ConsoleRenderer(
            columns=[
                Column("timestamp", KeyValueColumnFormatter(None, dim, plain, value_repr=str)),
                Column("level", LogLevelColumnFormatter(levels, plain, 9)),
                Column("event", KeyValueColumnFormatter(None, bright, plain, value_repr=str, width=_EVENT_WIDTH)),
                Column("", KeyValueColumnFormatter(cyan, "", plain, value_repr=_value)),
            ],
            exception_formatter=plain_traceback,
            sort_keys=False,
        )

    def __call__(self, event: Mapping[str, Any]) -> bytes:
        shown = {visible(key): value for key, value in event.items()}
        shown["event"] = visible(_as_text(event["event"]))
        if "exception" in event:
            shown["exception"] = "\n".join(f"  {visible(line)}" for line in _as_text(event["exception"]).splitlines())
        line = self._render(None, event["level"], shown).encode(errors="backslashreplace")
        return line if len(line) <= LINE_BYTES_MAX else line[:LINE_BYTES_MAX] + f"{_PLAIN}...".encode()


def _value(value: object) -> str:
    text = _as_text(value)
    plain = isinstance(value, str) and text.isprintable() and not set(text) & set(" =\"'")
    return text if plain and text else visible(repr(text) if isinstance(value, str) else text)


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - `repr` may raise anything
        return f"<{type(value).__name__} that cannot be shown>"


def _cut(event: Mapping[str, Any]) -> bytes:
    """The event as JSON with each field cut to its share of a line."""
    share = LINE_BYTES_MAX // max(1, len(event))
    fields = (f"{_shown_as_text(key, share // 4)}:{_shown(value, share // 2)}" for key, value in event.items())
    return f"{{{','.join(fields)}}}".encode()


def _shown(value: object, bytes_max: int) -> str:
    try:
        encoded = _encode(value)
    except Exception:  # noqa: BLE001 - the value is formatted as text instead
        encoded = b""
    return encoded.decode() if 0 < len(encoded) <= bytes_max else _shown_as_text(value, bytes_max)


def _shown_as_text(value: object, bytes_max: int) -> str:
    whole = text = _as_text(value).encode(errors="backslashreplace").decode()
    while len(_encode(text)) > max(bytes_max, 8):
        text = text[: len(text) // 2]
    return _encode(text if text is whole else f"{text}... ({len(whole)} characters)").decode()


_encode = msgspec.json.Encoder(enc_hook=_as_text).encode
