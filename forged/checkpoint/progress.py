"""Counts the bytes of an operation, and calls the caller's progress callback.

A callback that raises does not fail the operation: it is called no more, and its error is printed on stderr.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from forged.logger_adapter import report_failure

Progress = Callable[[int, int], object]
"""Called with the bytes done and the total; by several threads, one at a time."""


class ByteCount:
    """The bytes done of an operation, counted by several threads."""

    def __init__(self, total: int, callback: Progress | None = None) -> None:
        self.done = 0
        self._total = total
        self._callback = callback
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        """Count and report bytes. Bytes that are read again do not count beyond the total."""
        with self._lock:
            self.done = min(self._total, self.done + size)
            if self._callback is None:
                return
            try:
                self._callback(self.done, self._total)
            except Exception as error:  # noqa: BLE001 - a progress callback is code of the caller
                self._callback = None
                report_failure("the progress callback", error)

    def finish(self) -> None:
        """Report completion."""
        self.add(self._total)
