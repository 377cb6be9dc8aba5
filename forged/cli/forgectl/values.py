"""Values on the command line: parsed exactly, or refused with a message that names them."""

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
BYTES_MAX = (1 << 63) - 1
_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for base, prefixes, unit in ((1000, "kMGT", "B"), (1024, "KMGT", "iB"))
    for power, prefix in enumerate(prefixes, 1)
}
_BYTES = re.compile(rf"(?P<number>[0-9]{{1,{NUMBER_CHARS_MAX}}}) ?(?P<unit>{'|'.join(_UNITS)})")
_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def seconds(text: str) -> float:
    """A timeout in seconds."""
    try:
        waiting = float(text)
    except ValueError:
        waiting = 0.0
    if not 0 < waiting <= TIMEOUT_MAX_S:
        raise argparse.ArgumentTypeError(f"must be a number of seconds in (0, {TIMEOUT_MAX_S:g}], got {text!r}")
    return waiting


def lifetime(text: str) -> float:
    """The lifetime of a token in seconds."""
    try:
        waiting = float(text)
    except ValueError:
        waiting = 0.0
    if not 0 < waiting < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds > 0, got {text!r}")
    return waiting


def fact_id(text: str) -> int:
    """The id of a fact; 0 is before the first."""
    if not text.isdecimal() or len(text) > FACT_ID_DIGITS_MAX:
        raise argparse.ArgumentTypeError(f"a fact id must be an integer >= 0, got {text!r}")
    return int(text)


def version(text: str) -> int:
    """The version of a job's settings."""
    if not text.isdecimal() or len(text) > FACT_ID_DIGITS_MAX or not int(text):
        raise argparse.ArgumentTypeError(f"a version must be an integer >= 1, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """A step or an epoch."""
    if not text.isdecimal() or len(text) > NUMBER_CHARS_MAX or int(text) > INTEGER_MAX:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to {INTEGER_MAX}, got {text!r}")
    return int(text)


def byte_count(text: str) -> int:
    """A number of bytes, exact, with or without a unit."""
    found = _BYTES.fullmatch(text)
    size = int(found["number"]) * _UNITS[found["unit"]] if found else BYTES_MAX + 1
    if size > BYTES_MAX:
        units = ", ".join(filter(None, _UNITS))
        allowed = f"an integer from 0 to {BYTES_MAX}, or one with a unit ({units})"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
    return size


def texts_by_key(texts: Iterable[str], problem: str, fix: str) -> dict[str, str]:
    """Texts by key, given as `KEY=VALUE`; a text of another form is refused with the problem and the fix."""
    pairs = [text.partition("=") for text in texts]
    for key, separator, value in pairs:
        if not separator or not key:
            raise ConfigError("usage_wrong", f"{key + separator + value!r} {problem}", fix)
    return {key: value for key, _, value in pairs}


def settings(texts: Iterable[str]) -> dict[str, Any]:
    """Settings by key; each key may be given once."""
    given: dict[str, Any] = {}
    for text in texts:
        key, value = setting(text)
        if key in given:
            raise ConfigError("setting_invalid", f"{key} is given twice", "remove one of them")
        given[key] = value
    return given


def setting(text: str) -> tuple[str, Any]:
    """The key and the value of a `KEY=VALUE`."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError("setting_invalid", f"{text!r} is not a setting", "use KEY=VALUE")
    if _NUMBER.fullmatch(value):
        return key, _number(key, value)
    return key, {"true": True, "false": False, "none": None}.get(value.lower(), value)


def _number(key: str, text: str) -> int | float:
    """A number in JSON notation; `007` and `1_000` stay strings."""
    if not text.lstrip("-").isdecimal():
        return float(text)
    if len(text) > NUMBER_CHARS_MAX or not INTEGER_MIN <= int(text) <= INTEGER_MAX:
        raise ConfigError("setting_invalid", f"{key} must fit into 64 bits, got {text}", "use a smaller number")
    return int(text)
