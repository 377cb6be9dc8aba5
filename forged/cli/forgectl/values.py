"""What people write on the command line, as values.

Law: whatever is written is read as one thing or refused by its name, and never as something near it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any

from forged.errors import ConfigError

TIMEOUT_MAX_S = 3600.0
FACT_ID_DIGITS_MAX = 18
NUMBER_CHARS_MAX = 20
INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 64) - 1
_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def seconds(text: str) -> float:
    """How long to wait for an answer."""
    try:
        waiting = float(text)
    except ValueError:
        waiting = 0.0
    if not 0 < waiting <= TIMEOUT_MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to {TIMEOUT_MAX_S:g}")
    return waiting


def lifetime(text: str) -> float:
    """How long a token lives, in seconds."""
    try:
        waiting = float(text)
    except ValueError:
        waiting = 0.0
    if not 0 < waiting < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return waiting


def fact_id(text: str) -> int:
    """A position among the facts."""
    if not text.isdecimal() or len(text) > FACT_ID_DIGITS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not the id of a fact; 0 is before the first")
    return int(text)


def version(text: str) -> int:
    """Which change of a job's settings is meant."""
    if not text.isdecimal() or len(text) > FACT_ID_DIGITS_MAX or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a version; they count from 1")
    return int(text)


def settings(texts: Iterable[str]) -> dict[str, Any]:
    """Settings by their keys, each given once."""
    given: dict[str, Any] = {}
    for text in texts:
        key, value = setting(text)
        if key in given:
            raise ConfigError("setting_invalid", f"{key} is given twice", "leave one of them out")
        given[key] = value
    return given


def setting(text: str) -> tuple[str, Any]:
    """The key and the value of a setting."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError("setting_invalid", f"{text!r} is not a setting", "write KEY=VALUE")
    if _NUMBER.fullmatch(value):
        return key, _number(key, value)
    return key, {"true": True, "false": False, "none": None}.get(value.lower(), value)


def _number(key: str, text: str) -> int | float:
    """What is written as JSON writes numbers; `007` and `1_000` are names of something, and stay texts."""
    if not text.lstrip("-").isdecimal():
        return float(text)
    if len(text) > NUMBER_CHARS_MAX or not INTEGER_MIN <= int(text) <= INTEGER_MAX:
        raise ConfigError("setting_invalid", f"{key} is a whole number of more than 64 bits", "write a smaller one")
    return int(text)
