"""The processes of the demo: daemon, workers and operator commands.

No process outlives the demo: the kernel kills its children when it dies, and it kills their orphaned children.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from forged.demo import parent_death
from forged.demo.train import RECORDS
from forged.errors import ForgedError

LISTEN = "tcp://127.0.0.1:0"
ENDS_WITHIN_S = 20.0
OURS_TO_SET = ("FORGED_", "LISTEN_", "NOTIFY_SOCKET", "WATCHDOG_", "INVOCATION_ID", "JOURNAL_STREAM")
"""Environment variables that configure a daemon or forgectl and must not reach those of the demo."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""One thread per worker, so that the workers do not compete for the cores."""
PR_SET_CHILD_SUBREAPER = 36


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

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, listen: str = LISTEN) -> float:
        """Start it; returns the seconds until it is ready."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        places = ("--data-dir", str(self.directory), "--socket", str(self.socket), "--listen", listen)
        with _appending_to(self._log) as log:
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
        with _appending_to(self.output_log) as log:
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


def last_log_line(path: Path | None) -> str:
    """The last line of a log."""
    if path is None:
        return "see its output"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return lines[-1] if lines else "its log is empty"


@contextlib.contextmanager
def _appending_to(path: Path | None) -> Iterator[int | None]:
    """A descriptor to append to a log; None, for the standard error of this process, without a log."""
    if path is None:
        yield None
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)
