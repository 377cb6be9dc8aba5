"""Hides secrets in settings.

Invariants:
- A value under a key that contains one of `SECRET_WORDS` never appears in a message, fact or reply. The key decides,
  because the daemon does not know what a plugin's settings mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, time
from typing import Any

HIDDEN = "***"
SECRET_WORDS = ("secret", "password", "token", "key")
DEPTH_MAX = 16
"""How deep a plugin's settings may be nested; deeper values are not shown."""


def names_secret(key: str) -> bool:
    """Whether the value of this key is hidden."""
    return any(word in key.lower() for word in SECRET_WORDS)


def redacted(value: Any, depth: int = DEPTH_MAX) -> Any:
    """The value as plain lists, tables and text, with secrets hidden."""
    if isinstance(value, (Mapping, list, tuple)) and depth < 0:
        return "..."
    if isinstance(value, Mapping):
        return {
            _escaped(key): HIDDEN if names_secret(key) else redacted(inner, depth - 1) for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redacted(inner, depth - 1) for inner in value]
    if isinstance(value, (date, time)):
        return value.isoformat()
    return _escaped(value) if isinstance(value, str) else value


def _escaped(text: str) -> str:
    """The text with surrogates escaped: a path may contain bytes that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()
