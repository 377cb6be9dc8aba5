"""Runs a command that the kernel kills when its parent process dies.

If the parent dies before the kernel is told, the command is not run. The program uses only the standard library, so
that it starts fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def command(parent: int, words: Sequence[str]) -> list[str]:
    """The command line that runs `words` until the process `parent` dies."""
    return [sys.executable, "-I", "-S", __file__, f"{parent}", *words]


def main(parent: int, words: list[str]) -> None:
    """Replace this process by the command."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == parent:
        os.execvp(words[0], words)  # noqa: S606 - its caller builds this command line


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
