"""What of the settings may be shown.

Law: what a plugin may hold as a secret is shown to nobody, in no message, fact or reply. What names a secret tells it:
only the names of its keys are known of a plugin's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, time
from typing import Any

HIDDEN = "***"
SECRET_WORDS = ("secret", "password", "token", "key")
DEPTH_MAX = 16
"""How deep a plugin's settings may be nested; what is deeper is not shown."""


def names_secret(key: str) -> bool:
    """Whether the value of a key like this is to be hidden."""
    return any(word in key.lower() for word in SECRET_WORDS)


def shown(value: Any, depth: int = DEPTH_MAX) -> Any:
    """A value as plain lists, tables and texts, with what may be secret hidden in its tables."""
    if isinstance(value, (Mapping, list, tuple)) and depth < 0:
        return "..."
    if isinstance(value, Mapping):
        return {
            _encodable(key): HIDDEN if names_secret(key) else shown(inner, depth - 1) for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [shown(inner, depth - 1) for inner in value]
    if isinstance(value, (date, time)):
        return value.isoformat()
    return _encodable(value) if isinstance(value, str) else value


def _encodable(text: str) -> str:
    """A path may hold bytes that are no UTF-8, which a reply cannot carry."""
    return text.encode(errors="backslashreplace").decode()
