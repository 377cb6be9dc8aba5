"""Adapts a caller's logger, of structlog or Python's `logging`, to a `Log`.

Invariants:
- A logger that raises never fails its caller; its first error is printed on stderr.
- An error that is logged through `logging` while it is handled has its traceback.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from forged.errors import RequestRefused, describe
from forged.log import LEVELS, SILENT, Log

NAME = "forged"

Write = Callable[[str, str, Mapping[str, Any]], object]
"""Logs an event of a level with its fields."""


class AdaptedLog:
    """A `Log` that writes to a caller's logger."""

    def __init__(self, name: str, write: Write, is_enabled: Callable[[str], bool]) -> None:
        """`name` stands for the logger in the message about its first error."""
        self._name = name
        self._write = write
        self._is_enabled = is_enabled
        self._bound: Mapping[str, Any] = {}
        self._reported: list[BaseException] = []
        """The error that was printed, shared by all bound logs."""

    def hears(self, level: str, /) -> bool:
        try:
            return bool(self._is_enabled(level))
        except Exception as error:  # noqa: BLE001 - a logger is code of the caller
            self._report(error)
            return False

    def debug(self, event: str, **fields: Any) -> None:
        self._log("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._log("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._log("error", event, fields)

    def bind(self, **fields: Any) -> Log:
        bound = AdaptedLog(self._name, self._write, self._is_enabled)
        bound._bound, bound._reported = {**self._bound, **fields}, self._reported
        return bound

    def _log(self, level: str, event: str, fields: dict[str, Any]) -> None:
        try:
            self._write(level, event, {**self._bound, **fields})
        except Exception as error:  # noqa: BLE001 - a logger is code of the caller
            self._report(error)

    def _report(self, error: Exception) -> None:
        if self._reported:
            return
        self._reported.append(error)
        report_failure(f"the logger {self._name}", error)


def as_log(logger: Any) -> Log:
    """A `Log` for a logger of structlog or `logging`, or for another `Log`; None is silent."""
    if logger is None:
        return SILENT
    if logger is SILENT or isinstance(logger, AdaptedLog):
        adapted: Log = logger
        return adapted
    if logger is logging:
        logger = logging.getLogger()
    name = type(logger).__name__
    if isinstance(logger, logging.Logger | logging.LoggerAdapter):
        return AdaptedLog(name, _writing_text(logger), lambda level: logger.isEnabledFor(LEVELS[level]))
    if isinstance(logger, type) or not all(callable(getattr(logger, level, None)) for level in LEVELS):
        raise RequestRefused(
            "logger_invalid",
            f"logger must have the methods debug, info, warning and error, got {name}",
            "give a logger of structlog or of Python's logging, or None",
        )

    def write(level: str, event: str, fields: Mapping[str, Any]) -> None:
        getattr(logger, level)(event, **fields)

    def is_enabled(level: str) -> bool:
        if callable(hears := getattr(logger, "hears", None)):
            return bool(hears(level))
        if callable(is_enabled_for := getattr(logger, "is_enabled_for", None)):
            return bool(is_enabled_for(LEVELS[level]))
        return True

    return AdaptedLog(name, write, is_enabled)


def report_failure(what: str, error: Exception) -> None:
    """Print that code of the caller has failed, where the failure must not fail forged's own work."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"{NAME}: {what} failed: {' '.join(describe(error).split())}", file=sys.stderr, flush=True)


def _writing_text(logger: logging.Logger | logging.LoggerAdapter[Any]) -> Write:
    """Writes an event and its fields as one text."""

    def write(level: str, event: str, fields: Mapping[str, Any]) -> None:
        shown = ", ".join(["%s=%s"] * len(fields))
        # `logging` formats the message, and survives a field that cannot be formatted.
        text = f"{NAME}: %s ({shown})" if fields else f"{NAME}: %s"
        has_traceback = level == "error" and sys.exc_info()[0] is not None
        logger.log(LEVELS[level], text, event, *chain(*fields.items()), exc_info=has_traceback)

    return write


SCRIPT_LOG: Log = as_log(logging.getLogger(NAME))
"""A worker's log in its training script: the logger `forged`, which the script configures. Without a configuration,
warnings and errors appear on standard error."""
