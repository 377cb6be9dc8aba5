"""Writes log lines in a thread.

Invariants:
- `put` never blocks and never raises: a full pipe blocks the writer thread only.
- The queue is bounded by lines and bytes. Lost lines are counted, and the count is written when writing works again.
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
"""Writes a whole line, or raises `OSError` or `ValueError`."""


class LineWriter:
    """A queue of lines and the thread that writes them."""

    def __init__(self, write: Write, loss_line: Callable[[int, str], bytes]) -> None:
        self.lost = 0
        """The number of lines lost since the start."""
        self._write = write
        self._loss_line = loss_line
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._unreported = 0
        self._why = ""
        self._failing = False
        """The last write failed; only the next line can show whether writing works again."""
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line; it is lost if the queue is full."""
        with self._changed:
            if self._closed:
                return
            if len(self._lines) >= LINES_WAITING_MAX or self._bytes + len(line) > BYTES_WAITING_MAX:
                self._count_loss("the reader is too slow")
                return
            self._lines.append(line)
            self._bytes += len(line)
            self._changed.notify()

    def lose(self, why: str) -> None:
        """Count a line that could not be formatted."""
        with self._changed:
            self._count_loss(why)
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Write the queued lines for at most `timeout_s`; returns whether the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _count_loss(self, why: str) -> None:
        self.lost += 1
        self._unreported += 1
        self._why = why

    def _run(self) -> None:
        while (line := self._next()) is not None:
            written = self._try(line) if line else True
            if written and not self._lines:
                self._report_loss()

    def _next(self) -> bytes | None:
        """The next line; empty if there is only a loss to report; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed or (self._unreported and not self._failing))
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

    def _report_loss(self) -> None:
        with self._changed:
            unreported, why = self._unreported, self._why
        if not unreported:
            return
        try:
            self._write(self._loss_line(unreported, why))
        except (OSError, ValueError):
            self._failing = True
            return
        with self._changed:
            self._unreported -= unreported


class DescriptorWriter:
    """Writes to a duplicate of the descriptor, because a blocked write would hold the stream's lock."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._in_a_line = False

    def __call__(self, line: bytes) -> None:
        # After a partial write the next line begins on a line of its own.
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
        """Wait until a descriptor that another process made non-blocking is writable."""
        readiness = select.poll()
        readiness.register(self._descriptor, select.POLLOUT)
        readiness.poll()


class StreamWriter:
    """Writes to a stream without a file descriptor."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, line: bytes) -> None:
        self._stream.write(line.decode())
        self._stream.flush()

    def close(self) -> None:
        """The caller owns the stream."""


class NoWriter:
    """The writer of a stream that was closed before the process began."""

    def __call__(self, line: bytes) -> None:
        raise OSError("there is no stream to write to")

    def close(self) -> None:
        """Nothing to close."""


def writer_for(stream: TextIO | None) -> DescriptorWriter | StreamWriter | NoWriter:
    if stream is None or stream.closed:
        return NoWriter()
    try:
        return DescriptorWriter(stream.fileno())
    except (OSError, ValueError):
        return StreamWriter(stream)
