"""Lines on their way out of the process.

Law: whoever hands in a line never waits and never sees an error. A thread of its own writes, so that a pipe that nobody
reads stops that thread and nothing else; what waits for it is bounded, and what finds no room, or cannot be written, is
counted and told as soon as writing works again.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

LINES_WAITING_MAX = 10_000
BYTES_WAITING_MAX = 4 << 20

Write = Callable[[bytes], None]
"""Writes a line whole, or raises `OSError` or `ValueError`."""


class LineWriter:
    """Writes lines one after the other."""

    def __init__(self, write: Write, tell_loss: Callable[[int, str], bytes]) -> None:
        self.lost = 0
        """How many lines were lost since the start."""
        self._write = write
        self._tell_loss = tell_loss
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._untold = 0
        self._why = ""
        self._failing = False
        """The last line could not be written; only the next one can show whether it works again."""
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Have a line written by and by, if there is room."""
        with self._changed:
            if self._closed:
                return
            if len(self._lines) >= LINES_WAITING_MAX or self._bytes + len(line) > BYTES_WAITING_MAX:
                self._count_loss("nobody read them fast enough")
                return
            self._lines.append(line)
            self._bytes += len(line)
            self._changed.notify()

    def lose(self, why: str) -> None:
        """Count a line that could not even be made."""
        with self._changed:
            self._count_loss(why)
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Write what waits, for so long at most; tells whether all of it was handled."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _count_loss(self, why: str) -> None:
        self.lost += 1
        self._untold += 1
        self._why = why

    def _run(self) -> None:
        while (line := self._next()) is not None:
            written = self._try(line) if line else True
            if written and not self._lines:
                self._tell()

    def _next(self) -> bytes | None:
        """The next line, an empty one when only a loss is to be told, none after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed or (self._untold and not self._failing))
            if not self._lines:
                return None if self._closed else b""
            line = self._lines.popleft()
            self._bytes -= len(line)
            return line

    def _try(self, line: bytes) -> bool:
        try:
            self._write(line)
        except (OSError, ValueError) as error:
            self._failing = True
            with self._changed:
                self._count_loss(f"writing failed: {getattr(error, 'strerror', None) or error}")
            return False
        self._failing = False
        return True

    def _tell(self) -> None:
        with self._changed:
            untold, why = self._untold, self._why
        if not untold:
            return
        try:
            self._write(self._tell_loss(untold, why))
        except (OSError, ValueError):
            self._failing = True
            return
        with self._changed:
            self._untold -= untold


class DescriptorWriter:
    """Writes to a descriptor of its own, past the stream's buffer and lock: a write that hangs keeps nobody out."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._in_a_line = False

    def __call__(self, line: bytes) -> None:
        # What broke off in the middle must not swallow the beginning of the next line.
        rest = memoryview(b"\n" + line if self._in_a_line else line)
        while rest:
            try:
                written = os.write(self._descriptor, rest)
            except BlockingIOError:
                self._wait()
                continue
            rest = rest[written:]
            self._in_a_line = len(rest) > 0

    def close(self) -> None:
        os.close(self._descriptor)

    def _wait(self) -> None:
        """Somebody else has made it non-blocking; this thread is here to wait."""
        readiness = select.poll()
        readiness.register(self._descriptor, select.POLLOUT)
        readiness.poll()


class StreamWriter:
    """Writes to a stream that is no file of the system's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, line: bytes) -> None:
        self._stream.write(line.decode())
        self._stream.flush()

    def close(self) -> None:
        """The stream belongs to whoever made it."""


class NoWriter:
    """Stands for a stream that was closed before the process began."""

    def __call__(self, line: bytes) -> None:
        raise OSError("there is no stream to write to")

    def close(self) -> None:
        """There is nothing to close."""


def writer_for(stream: TextIO | None) -> DescriptorWriter | StreamWriter | NoWriter:
    """How to write to a stream."""
    if stream is None or stream.closed:
        return NoWriter()
    try:
        return DescriptorWriter(stream.fileno())
    except (OSError, ValueError):
        return StreamWriter(stream)
