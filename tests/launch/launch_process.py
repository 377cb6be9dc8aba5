"""A `forged launch` as users run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

SCRIPT = str(Path(__file__).parent / "train_script.py")
ENDS_WITHIN_S = 200.0


class OutputProcess:
    """A process, with output and errors in one stream. Killed at the end of the block."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.lines: list[str] = []
        self._command = command
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FORGED_")}
        self._environment = inherited | environment

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._environment
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate(timeout=ENDS_WITHIN_S)

    def wait_for(self, pattern: str, times: int = 1) -> list[re.Match[str]]:
        """Read lines until so many of them match."""
        assert self.process.stdout is not None
        found: list[re.Match[str]] = []
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if match := re.search(pattern, line):
                found.append(match)
                if len(found) == times:
                    return found
        raise AssertionError(f"the process has ended without {pattern!r}: {self.lines}")

    def end(self, number: signal.Signals | None = None) -> int:
        """Send a signal if one is named, and wait for the end; returns the exit code."""
        if number is not None:
            self.process.send_signal(number)
        assert self.process.stdout is not None
        self.lines += [line.rstrip("\n") for line in self.process.stdout]
        return self.process.wait(ENDS_WITHIN_S)


class LaunchProcess(OutputProcess):
    """A launch."""

    def __init__(self, *words: str, **environment: str) -> None:
        super().__init__(sys.executable, "-m", "forged.cli.forged", "launch", *words, **environment)


def run(*words: str, **environment: str) -> tuple[int, list[str]]:
    """Run a launch to its end; returns its exit code, and the lines of its output."""
    with LaunchProcess(*words, **environment) as launch:
        return launch.end(), launch.lines


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
