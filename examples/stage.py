"""How a demonstration speaks: steps, remarks, facts as they come, and checks.

Law: on a terminal it has colours, in a pipe it is plain text, and with `quiet` it says nothing: then what was found is
told as one object at the end.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field

from forged.cli.show import duration
from forged.cli.show import field as text_of
from forged.messages import Gap, Record

BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"
INDENT = "   "
RUN_SHOWN = 2
FLOOD_GAP_S = 0.1
"""Of facts of one kind that follow each other faster than this, the first few are shown and the others counted."""


@dataclass
class Stage:
    """Where it all is said; `checks` remembers each claim and whether it held."""

    quiet: bool = False
    checks: list[tuple[str, bool]] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)
    _steps: int = 0
    _kind: str = ""
    _shown: int = 0
    _hidden: int = 0
    _last_at: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it has been going on."""
        return time.monotonic() - self.began_at

    def step(self, title: str, *explanation: str) -> None:
        """Begin another part, and say what it shows."""
        self._end_run()
        self._steps += 1
        self._say("")
        self._say(self._paint(f"{self._steps}. {title}", BOLD))
        for line in explanation:
            self._say(self._paint(f"{INDENT}{line}", DIM))

    def remark(self, text: str, colour: str = CYAN) -> None:
        """Say what has just been done."""
        self._end_run()
        self._say(f"{INDENT}{self._paint('>', colour)} {text}")

    def fact(self, item: Record | Gap) -> None:
        """Show a fact on the timeline; of a long run of one kind, the beginning."""
        kind = item.type if isinstance(item, Record) else "Gap"
        now = time.monotonic()
        if kind != self._kind or now - self._last_at > FLOOD_GAP_S:
            self._end_run()
        self._kind, self._last_at = kind, now
        if self._shown < RUN_SHOWN:
            self._shown += 1
            self._say(f"{INDENT}{self._paint(f'{self.seconds:7.3f} s', DIM)}  {self._line(item)}")
        else:
            self._hidden += 1

    def check(self, claim: str, held: bool) -> None:
        """Say whether something was as promised."""
        self._end_run()
        self.checks.append((claim, held))
        self._say(f"{INDENT}{self._paint('ok  ', GREEN) if held else self._paint('FAIL', RED)}  {claim}")

    def conclude(self, text: str, held: bool) -> None:
        """Say how it went as a whole."""
        self._say("")
        self._say(f"{self._paint(text, GREEN if held else RED)} It took {duration(self.seconds)}.")

    def _line(self, item: Record | Gap) -> str:
        if isinstance(item, Gap):
            return self._paint(f"facts {item.first} to {item.last} are missing: {item.reason}", YELLOW)
        said = " ".join(f"{name}={text_of(name, one)}" for name, one in item.fields()["fact"].items())
        return f"#{item.id:<5} {item.job or '-':<7} {self._paint(f'{item.type:<14}', BOLD)} {said}"

    def _end_run(self) -> None:
        if self._hidden:
            self._say(self._paint(f"{INDENT}{'':9}  ... and {self._hidden:,} more {self._kind}", DIM))
        self._kind, self._shown, self._hidden = "", 0, 0

    def _paint(self, text: str, colour: str) -> str:
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
        return text if plain else f"\x1b[{colour}m{text}\x1b[0m"

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)
