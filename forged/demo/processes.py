"""The processes of the demo: workers and operator commands.

No process outlives the demo: the kernel kills its children when it dies, and it kills their orphaned children.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from forged.demo.train import RECORDS
from forged.errors import ForgedError
from forged.launch.daemon_process import appending_to, command, environment, last_log_line

PR_SET_CHILD_SUBREAPER = 36


class DemoWorker:
    """The training script as a process."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.records = directory / f"{name}{RECORDS}"
        self.output_log = directory / f"{name}.log"
        self.may_end = False
        """Whether the scenario expects its end."""
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return None if self._process is None else self._process.returncode

    @property
    def last_log_line(self) -> str:
        """The last line of its log."""
        return last_log_line(self.output_log)

    async def start(self, endpoint: str, workers: int, words: Sequence[str] = ()) -> None:
        with appending_to(self.output_log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *command(
                    "forged.demo.train", endpoint, self.name, str(self._directory), "--workers", f"{workers}", *words
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> None:
        if self._process is not None:
            await self._process.wait()


async def forgectl(socket: Path, *words: str) -> str:
    """Run a command; returns its output."""
    process = await asyncio.create_subprocess_exec(
        *command("forged.cli.forgectl.main", "--socket", str(socket), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    )
    try:
        output_log, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ForgedError("forgectl_failed", f"forgectl {' '.join(words)}: {errors.decode().strip()}")
    return output_log.decode()


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Become the parent of orphaned descendants, and kill all new children at the end of the block."""
    others = _children()
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _end_the_rest(others)
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end_the_rest(others: set[int]) -> None:
    while children := _children() - others:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        # A thread may end meanwhile; its children then belong to another thread.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= {*map(int, (task / "children").read_text().split())}
    return found
