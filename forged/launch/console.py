"""What a launch prints: the lines of its workers, messages, and a line of progress on a terminal.

Invariants:
- The line of progress is erased before anything else is printed, and never reaches a pipe.
- A reader that has gone ends the output, not the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

ERASE = b"\r\x1b[K"
OUTPUT, ERRORS = "output", "errors"


class Console:
    """Writes to the launcher's output and errors."""

    def __init__(self, output: BinaryIO, errors: BinaryIO, *, is_terminal: bool) -> None:
        self._streams: dict[str, BinaryIO | None] = {OUTPUT: output, ERRORS: errors}
        """None once its reader is gone."""
        self.shows_progress = is_terminal
        self._progress = b""

    def lines(self, rank: int, lines: Sequence[bytes], *, is_error: bool) -> None:
        """Print lines of a worker after its initial rank."""
        if lines:
            self._write(ERRORS if is_error else OUTPUT, b"".join(b"[%d]: %s\n" % (rank, line) for line in lines))

    def say(self, text: str) -> None:
        """Print a message of the launcher itself."""
        self._write(ERRORS, f"forged launch: {text}\n".encode(errors="backslashreplace"))

    def progress(self, text: str) -> None:
        """Replace the line of progress; empty: erase it."""
        if self.shows_progress and text.encode() != self._progress:
            self._progress = text.encode()
            self._write(ERRORS, b"")

    def _write(self, name: str, data: bytes) -> None:
        if self.shows_progress:
            self._put(ERRORS, ERASE)
        self._put(name, data)
        if self.shows_progress:
            self._put(ERRORS, self._progress)

    def _put(self, name: str, data: bytes) -> None:
        stream = self._streams[name]
        if stream is None:
            return
        try:
            stream.write(data)
            stream.flush()
        except OSError:
            self._streams[name] = None
