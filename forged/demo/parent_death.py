"""Runs a command that the kernel kills when whoever started it is gone.

Law: nothing runs that nobody would end. Whoever started it may be gone before the kernel has been asked; then the
command is not run at all. This is a program that needs nothing but the standard library, so that it costs little.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def command(holder: int, words: Sequence[str]) -> list[str]:
    """What to run in order to run the command on the leash of that process."""
    return [sys.executable, "-I", "-S", __file__, f"{holder}", *words]


def main(holder: int, words: list[str]) -> None:
    """Become the command."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == holder:
        os.execvp(words[0], words)  # noqa: S606 - what our own process has put together


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
