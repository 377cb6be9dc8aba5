"""How far something is, in one line of a terminal.

Law: it is drawn on standard error, in place, and gone when it is over, so that it never mixes with what is answered.
Where standard error is no terminal, or a program is to be told, nothing is drawn. That it cannot be drawn holds nothing
up.
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
"""What takes less needs no bar."""
INTERVAL_S = 0.1
SHAPES = ((24, 4, True), (10, 4, True), (10, 3, True), (10, 2, False), (0, 1, False))
"""As the terminal gets narrower: how wide the bar itself is, how many figures stand beside it, and whether a name."""
AWAY = "\r\x1b[K"


class Bar:
    """A bar, for as long as the block lasts; called with how many bytes are done, and of how many."""

    def __init__(self, options: Options, name: str = "", monotonic: Callable[[], float] = time.monotonic) -> None:
        self._name = plain(name)
        self._monotonic = monotonic
        self._is_drawn = not options.json and can_be_drawn()
        self._started_at = monotonic()
        self._next_at = self._started_at + FIRST_AFTER_S
        self._stands = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stands:
            self._write(AWAY)

    def __call__(self, done: int, total: int) -> None:
        """So far it has come. May be called from any thread, by one at a time."""
        now = self._monotonic()
        if not self._is_drawn or now < self._next_at:
            return
        self._next_at = now + INTERVAL_S
        self._stands = True
        self._write(f"{AWAY}{line(self._name, done, total, now - self._started_at, _columns())}")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            # The terminal is gone; what is being done is not.
            self._is_drawn = False


def line(name: str, done: int, total: int, elapsed_s: float, columns: int) -> str:
    """What there is to say, as much of it as there is room for."""
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


def can_be_drawn() -> bool:
    """Whether standard error is a terminal that knows how."""
    return bool(sys.stderr) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _columns() -> int:
    try:
        # That of standard output may be a file.
        return os.get_terminal_size(sys.stderr.fileno()).columns or shutil.get_terminal_size().columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns
