"""Reads the environment variables that systemd sets for a service.

Invariants:
- The variables are removed from the environment, so that child processes do not use them.
- An invalid value raises a `ConfigError` that names the variable.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from forged.errors import ConfigError

Environment = MutableMapping[str, str]

DIGITS_MAX = 20
"""The digits of the largest 64-bit number."""


def take(environment: Environment, name: str) -> str:
    """Remove the variable and return its value; empty if it is not set."""
    return environment.pop(name, "")


def whole_number(name: str, text: str) -> int | None:
    """Parse a decimal number; None for an empty text."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX):
        raise invalid_variable(name, text, "a whole number")
    return int(text)


def invalid_variable(name: str, text: str, wanted: str) -> ConfigError:
    return ConfigError(
        "environment_invalid", f"{name} must be {wanted}, got {text!r}", "let systemd set it, or unset it"
    )
