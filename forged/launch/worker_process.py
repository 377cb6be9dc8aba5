"""One process of a worker: its start, its output, and its end.

Invariants:
- It leads a session of its own, so that Ctrl-C reaches it by the launcher alone, and what it has started can be killed.
- Nothing that it has started outlives it, but for its pulse, which tells the daemon of its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import anyio

from forged.launch import parent_death
from forged.launch.console import Console
from forged.launch.guard import Guard, kill_group
from forged.launch.lines import Lines, last_lines

READ_BYTES = 64 * 1024
OUTPUT_ENDS_WITHIN_S = 2.0
"""After the end of the process; a process that has left its group may hold the output open."""


class Output(NamedTuple):
    """A pipe with the output of a process.

    Not one of asyncio's own: before Python 3.12.4 asyncio tells the end of a process only when its pipes end,
    and what the process has started, such as loading processes, may hold them open.
    """

    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport
    written: int
    """The descriptor for the process."""

    @classmethod
    async def open(cls) -> Self:
        """A pipe; `written` is closed here when the process has it."""
        read, written = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", 0)
        )
        return cls(reader, transport, written)

    def close(self) -> None:
        """Read no more."""
        self.transport.close()


class WorkerProcess:
    """A worker that runs; made by `start`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        outputs: Sequence[Output],
        *,
        rank: int,
        console: Console,
        log: Path | None,
        guard: Guard,
    ) -> None:
        self._process = process
        self._outputs = outputs
        self._rank = rank
        self._console = console
        self._log = log
        self._guard = guard
        self._last = last_lines()

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        rank: int,
        console: Console,
        log: Path | None,
        guard: Guard,
    ) -> Self:
        """Start a worker that the kernel kills when this process dies."""
        outputs = [await Output.open(), await Output.open()]
        try:
            process = await asyncio.create_subprocess_exec(
                *parent_death.command(os.getpid(), command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=outputs[0].written,
                stderr=outputs[1].written,
                env=environment,
                start_new_session=True,
            )
        except BaseException:
            for output in outputs:
                output.close()
            raise
        finally:
            for output in outputs:
                os.close(output.written)
        guard.add(process.pid)
        return cls(process, outputs, rank=rank, console=console, log=log, guard=guard)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, negative after a signal; None while it runs."""
        return self._process.returncode

    @property
    def last_lines(self) -> list[str]:
        """The last lines of its output."""
        return [line.decode(errors="replace") for line in self._last]

    async def run(self) -> int:
        """Pass its output on until it has ended; returns its exit code."""
        try:
            async with anyio.create_task_group() as tasks:
                for output, is_error in zip(self._outputs, (False, True), strict=True):
                    tasks.start_soon(self._pass_on, output.reader, is_error)
                code = await self._process.wait()
                self._guard.remove(self.pid)
                tasks.cancel_scope.deadline = anyio.current_time() + OUTPUT_ENDS_WITHIN_S
        finally:
            if self.code is None:
                self.kill()
            for output in self._outputs:
                output.close()
        return code

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and all that it has started, unless it has ended."""
        if self.code is None:
            kill_group(self.pid)

    async def _pass_on(self, stream: asyncio.StreamReader, is_error: bool) -> None:
        lines = Lines(self._last)
        try:
            while data := await stream.read(READ_BYTES):
                self._file(data)
                self._console.lines(self._rank, lines.feed(data), is_error=is_error)
        finally:
            self._console.lines(self._rank, lines.end(), is_error=is_error)

    def _file(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            with self._log.open("ab") as file:
                file.write(data)
        except OSError as error:
            self._console.say(
                f"cannot write {self._log}: {error.strerror}; nothing more of worker {self._rank} is filed"
            )
            self._log = None
