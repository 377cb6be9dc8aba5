"""The processes of a demonstration: daemons, workers, and what an operator types.

Law: nothing outlives the demonstration. What it starts is killed by the kernel when it dies, whatever it dies of; what
those have started falls to it, and is ended with it.
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
"""What the surroundings may say to a daemon or to forgectl, and these here must not hear."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""So that several workers on one machine do not compete for its cores."""
PR_SET_CHILD_SUBREAPER = 36


def environment() -> dict[str, str]:
    """What the processes are told by theirs."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS_TO_SET)} | ONE_THREAD


def command(module: str, *words: str) -> Sequence[str]:
    """How a module is run that dies with this process."""
    return parent_death.command(os.getpid(), [sys.executable, "-m", module, *words])


class DaemonProcess:
    """`forged run` as an operator starts it, on the embedded store."""

    def __init__(self, directory: Path, socket: Path | None = None, log: Path | None = None) -> None:
        self.directory = directory
        self.socket = socket or directory / "forged.sock"
        self.serves = False
        """Whether it is ready, and was not killed or stopped since."""
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, listen: str = LISTEN) -> float:
        """Start it; returns how many seconds it took until it was ready."""
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
            raise ForgedError("daemon_not_started", f"the daemon did not start: {last_words(self._log)}")
        self.serves = True
        return loop.time() - began

    async def kill(self) -> None:
        """What the kernel does to it when memory is short, or an operator in a hurry: kill -9."""
        assert self._process is not None
        self.serves = False
        self._process.kill()
        await self._process.communicate()

    async def stop(self) -> int | None:
        """Ask it to end, if it was started; returns its exit code."""
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


class WorkerProcess:
    """The training script in a process of its own."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.records = directory / f"{name}{RECORDS}"
        self.said = directory / f"{name}.log"
        self.may_end = False
        """Whether its end would be part of the story."""
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
    def last_words(self) -> str:
        """The last line that it has said outside its records."""
        return last_words(self.said)

    async def start(self, endpoint: str, workers: int) -> None:
        with _appending_to(self.said) as log:
            self._process = await asyncio.create_subprocess_exec(
                *command("forged.demo.train", endpoint, self.name, str(self._directory), "--workers", f"{workers}"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill -9, which nobody can prepare for."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> None:
        if self._process is not None:
            await self._process.wait()


async def forgectl(socket: Path, *words: str) -> str:
    """Type a command; returns what it answers."""
    process = await asyncio.create_subprocess_exec(
        *command("forged.cli.forgectl.main", "--socket", str(socket), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    )
    try:
        said, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ForgedError("forgectl_failed", f"forgectl {' '.join(words)}: {complaint.decode().strip()}")
    return said.decode()


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Be the one to whom the children of children fall when those die, and kill at the end all who have come since."""
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
        # A thread may end while it is looked at; its children are another's then.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= {*map(int, (task / "children").read_text().split())}
    return found


def last_words(path: Path | None) -> str:
    """The last line that a process has left in its log."""
    if path is None:
        return "it has said why"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return lines[-1] if lines else "it said nothing"


@contextlib.contextmanager
def _appending_to(path: Path | None) -> Iterator[int | None]:
    """A file for what a process says; our own standard error, where there is none."""
    if path is None:
        yield None
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)
