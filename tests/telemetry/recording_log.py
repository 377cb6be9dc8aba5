"""A log that records its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forged.log import LEVELS, Log


@dataclass
class RecordingLog:
    """An implementation of `forged.log.Log`; bound logs share one list."""

    lines: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    level: str = "debug"
    bound: dict[str, Any] = field(default_factory=dict)

    def hears(self, level: str, /) -> bool:
        return LEVELS[level] >= LEVELS[self.level]

    def debug(self, event: str, **fields: Any) -> None:
        self._keep("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._keep("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._keep("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._keep("error", event, fields)

    def bind(self, **fields: Any) -> Log:
        return RecordingLog(self.lines, self.level, self.bound | fields)

    def of(self, event: str) -> list[dict[str, Any]]:
        """The fields of all lines with this event."""
        return [fields for _, said, fields in self.lines if said == event]

    def levels(self, event: str) -> set[str]:
        """The levels of the lines with this event."""
        return {level for level, said, _ in self.lines if said == event}

    def _keep(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if self.hears(level):
            self.lines.append((level, event, self.bound | fields))
