"""What a launch prints: the lines of its workers, messages, and a line of progress on a terminal.

Invariants:
- The line of progress is erased before anything else is printed, and never reaches a pipe.
- A reader that has gone ends the output, not the training.
- What workers print moves no cursor and gives the terminal no orders; colours end with their line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import BinaryIO

ERASE = b"\r\x1b[K"
OUTPUT, ERRORS = "output", "errors"
_COLOUR = "\x1b["
_ORDER = re.compile(
    r"(\x1b\[[0-9;:]*m)"  # a colour, which stays
    r"|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"  # an escape sequence
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"  # a control character other than a tab
)
_END_OF_COLOURS = "\x1b[0m"


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
            self._write(ERRORS if is_error else OUTPUT, b"".join(b"[%d]: %s\n" % (rank, shown(line)) for line in lines))

    def say(self, text: str) -> None:
        """Print a message of the launcher itself."""
        lines = text.encode(errors="backslashreplace").split(b"\n")
        self._write(ERRORS, b"forged launch: " + b"\n".join(map(shown, lines)) + b"\n")

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


def shown(line: bytes) -> bytes:
    """A line as it is printed: with its colours, and without other orders to the terminal."""
    # As text: bytes of a character would become another one if what is between them was removed.
    text = line.decode(errors="backslashreplace")
    if not text.isprintable():
        text = _ORDER.sub(lambda order: order[1] or "", text)
        text += _END_OF_COLOURS if _COLOUR in text else ""
    return text.encode(errors="backslashreplace")
