"""Kills the process groups of workers whose launcher is gone, also after a kill -9 of it.

The kernel kills the workers themselves (parent_death.py); this program kills what they have started. It reads the
numbers of process groups from standard input, a number to add and a negative one to remove, and acts at its end. Then
it deletes the directory that its command line names. It uses only the standard library, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


def main(lines: Iterable[str], directory: str = "") -> None:
    """Follow the launcher until it ends, and remove what it has left."""
    groups: set[int] = set()
    for line in lines:
        number = int(line)
        if number > 0:
            groups.add(number)
        else:
            groups.discard(-number)
    for group in groups:
        kill_group(group)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def kill_group(group: int) -> None:
    """Kill all processes of a group; it may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class Guard:
    """The guard process of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def add(self, group: int) -> None:
        """Kill this group if the launcher ends without removing it."""
        self._tell(group)

    def remove(self, group: int) -> None:
        """Kill what is left of this group now."""
        kill_group(group)
        self._tell(-group)

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        # Without a guard the workers still die with the launcher, only not what they have started.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"%d\n" % number)
            self._process.stdin.flush()


@contextlib.contextmanager
def guarding(directory: Path | None = None) -> Iterator[Guard]:
    """Have a guard process inside the block; it deletes the directory at the end."""
    command = [sys.executable, "-I", "-S", __file__, *([] if directory is None else [str(directory)])]
    # In a session of its own, so that what ends the launcher does not end it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as process:  # noqa: S603
        yield Guard(process)


if __name__ == "__main__":
    main(sys.stdin, *sys.argv[1:])
