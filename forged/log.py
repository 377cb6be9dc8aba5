"""What the parts of the daemon log to.

Law: a log takes an event, in words that do not change, and its fields; it never raises and never waits. Whoever logs
knows nothing of formats, files or levels that are switched off, and logs nothing when it was given no log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

LEVELS: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""By name, the lesser ones first; the numbers are those of Python's own `logging`."""


class Log(Protocol):
    """Says what happens, with the fields that were bound to it."""

    def hears(self, level: str, /) -> bool:
        """Whether anything of this level is said at all; to be asked before fields that cost something are made."""
        ...

    def debug(self, event: str, **fields: Any) -> None:
        """For whoever looks for a mistake."""
        ...

    def info(self, event: str, **fields: Any) -> None:
        """For whoever wants to know what was going on."""
        ...

    def warning(self, event: str, **fields: Any) -> None:
        """Somebody should look at it some time."""
        ...

    def error(self, event: str, **fields: Any) -> None:
        """Somebody should look at it now."""
        ...

    def bind(self, **fields: Any) -> Log:
        """A log that says these fields with every event."""
        ...


class _Silent:
    """Hears nothing."""

    def hears(self, level: str, /) -> bool:
        return False

    def debug(self, event: str, **fields: Any) -> None:
        return

    info = warning = error = debug

    def bind(self, **fields: Any) -> Log:
        return self


SILENT: Log = _Silent()
"""For those who were given no other log: tests, simulations, libraries."""
