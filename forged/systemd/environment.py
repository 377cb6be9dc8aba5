"""What the service manager says in the environment of what it starts.

Law: its variables are for this process alone. They are taken out of the environment whatever they hold, so that no
child takes them for its own; one that makes no sense is the operator's to mend, and named.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from forged.errors import ConfigError

Environment = MutableMapping[str, str]

DIGITS_MAX = 20
"""As many as the largest number of 64 bits has."""


def take(environment: Environment, name: str) -> str:
    """The variable's value, which is gone from the environment then; empty where there is none."""
    return environment.pop(name, "")


def whole_number(name: str, text: str) -> int | None:
    """Read a number as systemd writes it, digits and nothing else; None for an empty text."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX):
        raise nonsense(name, text, "a whole number")
    return int(text)


def nonsense(name: str, text: str, wanted: str) -> ConfigError:
    """What to raise for a variable that cannot be understood."""
    return ConfigError("environment_invalid", f"{name} = {text!r} is not {wanted}", "let systemd set it, or unset it")
