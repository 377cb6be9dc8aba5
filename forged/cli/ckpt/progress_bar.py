"""A progress bar in one line of the terminal.

Invariants:
- It is drawn on standard error and erased at the end, so it never mixes with the output.
- Nothing is drawn without a terminal or with `--json`.
- A terminal that cannot be written to does not stop the command.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from forged.cli.forgectl import tables
from forged.cli.forgectl.parser import Options
from forged.cli.process import plain

FIRST_AFTER_S = 0.2
"""Shorter operations show no bar."""
INTERVAL_S = 0.1
SHAPES = ((24, 4, True), (10, 4, True), (10, 3, True), (10, 2, False), (0, 1, False))
"""For narrowing terminals: the width of the bar, the number of figures, and whether the name is shown."""
CLEAR_LINE = "\r\x1b[K"


class ProgressBar:
    """A progress bar for the duration of a block; called with the bytes done and the total."""

    def __init__(self, options: Options, name: str = "", monotonic: Callable[[], float] = time.monotonic) -> None:
        self._name = plain(name)
        self._monotonic = monotonic
        self._is_enabled = not options.json and is_supported()
        self._started_at = monotonic()
        self._next_at = self._started_at + FIRST_AFTER_S
        self._is_visible = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_visible:
            self._write(CLEAR_LINE)

    def __call__(self, done: int, total: int) -> None:
        """Draw the progress. May be called from any thread, one at a time."""
        now = self._monotonic()
        if not self._is_enabled or now < self._next_at:
            return
        self._next_at = now + INTERVAL_S
        self._is_visible = True
        self._write(f"{CLEAR_LINE}{progress_line(self._name, done, total, now - self._started_at, _columns())}")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            # The terminal is gone; the operation continues.
            self._is_enabled = False


def progress_line(name: str, done: int, total: int, elapsed_s: float, columns: int) -> str:
    """The line, shortened to the width of the terminal."""
    part = min(1.0, done / total) if total else 1.0
    rate = done / elapsed_s if elapsed_s > 0 else 0.0
    figures = [f"{part:4.0%}", f"{tables.size(done)} of {tables.size(total)}", f"{tables.size(int(rate))}/s"]
    if rate and done < total:
        figures.append(f"{tables.duration(max(1, round((total - done) / rate)))} left")
    text = ""
    for width, count, is_named in SHAPES:
        beside = [tables.bar(part, width)] * bool(width) + figures[:count]
        text = "  ".join([name] * (is_named and bool(name)) + beside)
        if len(text) < columns:
            break
    return text[: columns - 1]


def is_supported() -> bool:
    """Whether standard error is a terminal that can redraw a line."""
    return bool(sys.stderr) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _columns() -> int:
    try:
        # Standard output may be a file, so its width is only the fallback.
        return os.get_terminal_size(sys.stderr.fileno()).columns or shutil.get_terminal_size().columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns
