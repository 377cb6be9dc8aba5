"""Divides the output of a worker into lines.

Invariants:
- A carriage return ends a line too, as the progress bars of training scripts need it.
- No more than `LINE_BYTES_MAX` bytes wait for the end of their line.
"""

from __future__ import annotations

import re
from collections import deque

LINE_BYTES_MAX = 64 * 1024
LAST_LINES = 20
_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A carriage return at the end of what was read may be the first half of a line's end."""


class Lines:
    """The lines of one stream; `last` keeps the latest of several streams."""

    def __init__(self, last: deque[bytes]) -> None:
        self._rest = b""
        self._last = last

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their ends."""
        *lines, self._rest = _END.split(self._rest + data)
        while len(self._rest) > LINE_BYTES_MAX:
            lines.append(self._rest[:LINE_BYTES_MAX])
            self._rest = self._rest[LINE_BYTES_MAX:]
        return self._kept([line for line in lines if line])

    def end(self) -> list[bytes]:
        """The line that was not ended."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return self._kept([rest] if rest else [])

    def _kept(self, lines: list[bytes]) -> list[bytes]:
        self._last.extend(lines)
        return lines


def last_lines() -> deque[bytes]:
    """Where the last lines of a worker are kept."""
    return deque(maxlen=LAST_LINES)
