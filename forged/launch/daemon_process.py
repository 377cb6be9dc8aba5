"""A daemon as a child process, which ends with this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from forged.errors import ForgedError
from forged.launch import parent_death

LISTEN = "tcp://127.0.0.1:0"
ENDS_WITHIN_S = 20.0
OURS_TO_SET = ("FORGED_", "LISTEN_", "NOTIFY_SOCKET", "WATCHDOG_", "INVOCATION_ID", "JOURNAL_STREAM")
"""Environment variables that configure a daemon or forgectl and must not reach this one."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""One thread per worker, so that the workers do not compete for the cores."""


def environment() -> dict[str, str]:
    """The environment of the processes."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS_TO_SET)} | ONE_THREAD


def command(module: str, *words: str) -> Sequence[str]:
    """The command line of a module that dies with this process."""
    return parent_death.command(os.getpid(), [sys.executable, "-m", module, *words])


class DaemonProcess:
    """A `forged run` process."""

    def __init__(self, directory: Path, socket: Path | None = None, log: Path | None = None) -> None:
        self.directory = directory
        self.socket = socket or directory / "forged.sock"
        self.serves = False
        """Whether it is ready and was not killed or stopped since."""
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def wait(self) -> int:
        """Wait until the process has ended; returns its exit code."""
        assert self._process is not None
        await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, listen: str = LISTEN) -> float:
        """Start it; returns the seconds until it is ready."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        places = ("--data-dir", str(self.directory), "--socket", str(self.socket), "--listen", listen)
        with appending_to(self._log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *command("forged.cli.forged", "run", *places, "--log-level", "error"),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )
        assert self._process.stdout is not None
        if b"is ready" not in await self._process.stdout.readline():
            raise ForgedError("daemon_not_started", f"the daemon did not start: {last_log_line(self._log)}")
        self.serves = True
        return loop.time() - began

    async def kill(self) -> None:
        """Kill it with SIGKILL."""
        assert self._process is not None
        self.serves = False
        self._process.kill()
        await self._process.communicate()

    async def stop(self) -> int | None:
        """Stop it with SIGTERM if it was started; returns its exit code."""
        if self._process is None:
            return None
        self.serves = False
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                await self._process.communicate()
        except TimeoutError:
            await self.kill()
        return self._process.returncode


def last_log_line(path: Path | None) -> str:
    """The last line of a log."""
    if path is None:
        return "see its output"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return lines[-1] if lines else "its log is empty"


@contextlib.contextmanager
def appending_to(path: Path | None) -> Iterator[int | None]:
    """A descriptor to append to a log; None, for the standard error of this process, without a log."""
    if path is None:
        yield None
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)
