"""The output of the demo: parts, notes, facts as they arrive, and checks.

It is coloured on a terminal and plain text in a pipe. With `quiet` nothing is printed.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from dataclasses import dataclass, field

from forged.cli.forgectl.fact_sentences import in_words
from forged.cli.forgectl.tables import duration
from forged.cli.forgectl.tables import fields as texts_of
from forged.kernel.messages import Gap, Record

BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"
COLOURS = {
    "WorkerFailed": RED,
    "WorkerLost": YELLOW,
    "JobAborted": RED,
    "ShardsLost": RED,
    "CorruptShardFound": RED,
    "RescaleCompleted": GREEN,
    "JobCompleted": GREEN,
}
"""Colours of important facts."""
REASON_TOLD_BEFORE = frozenset({"RescaleCompleted"})
"""Facts that repeat the reason of an earlier fact."""
INDENT = "   "
WIDTH_MIN = 60
PROSE_WIDTH = 110
RUN_SHOWN = 2
FLOOD_GAP_S = 0.1
"""Of facts of one type that follow each other faster than this, the first few are shown and the rest counted."""


@dataclass
class Output:
    """Prints the demo; `checks` holds each claim and whether it held."""

    quiet: bool = False
    run_shown: int = RUN_SHOWN
    checks: list[tuple[str, bool]] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)
    _steps: int = 0
    _kind: str = ""
    _shown: int = 0
    _hidden: int = 0
    _last_at: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began_at

    def step(self, title: str, *explanation: str) -> None:
        """Start a part with a title and an explanation."""
        self._end_run()
        self._steps += 1
        self._put("", "")
        self._put("", f"{self._steps}. {title}", BOLD)
        self._put(INDENT, " ".join(explanation), DIM, width=PROSE_WIDTH)

    def note(self, text: str, colour: str = CYAN) -> None:
        """Print an action or a result."""
        self._end_run()
        self._put(f"{INDENT}> ", text, mark_colour=colour)

    def fact(self, item: Record | Gap) -> None:
        """Print a fact with its time; of a long run of one type, only the beginning."""
        kind = item.type if isinstance(item, Record) else "Gap"
        now = time.monotonic()
        if kind != self._kind or now - self._last_at > FLOOD_GAP_S:
            self._end_run()
        self._kind, self._last_at = kind, now
        if self._shown < self.run_shown:
            self._shown += 1
            self._put(self._now(), *_sentence(item), mark_colour=DIM)
        else:
            self._hidden += 1

    def progress(self, text: str) -> None:
        """Print progress with its time."""
        self._end_run()
        self._put(self._now(), text, CYAN, mark_colour=DIM)

    def quote(self, text: str) -> None:
        """Print the output of a command."""
        self._end_run()
        mark = f"{INDENT}| "
        for line in text.splitlines():
            self._put(mark, line, mark_colour=DIM, mark_below=mark)

    def check(self, claim: str, held: bool) -> None:
        """Print and record whether a claim held."""
        self._end_run()
        self.checks.append((claim, held))
        mark, colour = ("ok    ", GREEN) if held else ("FAIL  ", RED)
        self._put(f"{INDENT}{mark}", claim, mark_colour=colour)

    def finish_output(self, text: str, held: bool) -> None:
        """Print the final result."""
        self._put("", "")
        self._put("", f"{text} The demo took {duration(self.seconds)}.", GREEN if held else RED)

    def _now(self) -> str:
        return f"{INDENT}{self.seconds:7.3f} s  "

    def _end_run(self) -> None:
        if self._hidden:
            self._put(f"{INDENT}{'':9}  ", f"... and {self._hidden:,} more {self._kind}", DIM)
        self._kind, self._shown, self._hidden = "", 0, 0

    def _put(
        self, mark: str, text: str, colour: str = "", *, mark_colour: str = "", mark_below: str = "", width: int = 0
    ) -> None:
        """Print text after a mark; on a terminal, long text is wrapped."""
        if self.quiet:
            return
        if sys.stdout.isatty():
            columns = max(shutil.get_terminal_size().columns, WIDTH_MIN)
            width = min(width or columns, columns)
        room = width - len(mark)
        lines = textwrap.wrap(text, room, break_on_hyphens=False) if 0 < room < len(text) else [text]
        for number, line in enumerate(lines):
            before = mark if number == 0 else mark_below or " " * len(mark)
            print(f"{_paint(before, mark_colour)}{_paint(line, colour)}".rstrip(), flush=True)


def _sentence(item: Record | Gap) -> tuple[str, str]:
    """The sentence for a fact, and its colour."""
    if isinstance(item, Gap):
        return f"facts {item.first} to {item.last} missing: {item.reason}", YELLOW
    fact = item.fields()["fact"]
    if item.type in REASON_TOLD_BEFORE:
        fact = {key: value for key, value in fact.items() if key != "reason"}
    output_log = in_words(item.type, fact) or f"{item.type} {texts_of(fact)}"
    return f"#{item.id:<4} {output_log}", COLOURS.get(item.type, "")


def _paint(text: str, colour: str) -> str:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if plain or not text or not colour else f"\x1b[{colour}m{text}\x1b[0m"
