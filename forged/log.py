"""The log port: constant event texts with fields.

A log never raises and never blocks. Formats, files and enabled levels are the implementation's; the default is
`SILENT`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

LEVELS: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""In ascending order, with the numbers of Python's `logging`."""


class Log(Protocol):
    """A structured logger with bound fields."""

    def hears(self, level: str, /) -> bool:
        """Whether the level is enabled; check it before computing expensive fields."""
        ...

    def debug(self, event: str, **fields: Any) -> None:
        """For debugging."""
        ...

    def info(self, event: str, **fields: Any) -> None:
        """Normal operation."""
        ...

    def warning(self, event: str, **fields: Any) -> None:
        """An operator should look at it eventually."""
        ...

    def error(self, event: str, **fields: Any) -> None:
        """An operator should look at it now."""
        ...

    def bind(self, **fields: Any) -> Log:
        """A log that adds these fields to every event."""
        ...


class _Silent:
    """Drops everything."""

    def hears(self, level: str, /) -> bool:
        return False

    def debug(self, event: str, **fields: Any) -> None:
        return

    info = warning = error = debug

    def bind(self, **fields: Any) -> Log:
        return self


SILENT: Log = _Silent()
"""The default log of tests, simulations and library use."""
