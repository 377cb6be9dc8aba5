"""A fork server: starts processes in milliseconds by forking, where imports alone take half a second.

Invariants:
- The server has one thread and no event loop, so a forked process is like one started by a shell.
- When the controlling process is gone, the server kills all its children and ends.

A command is a line of JSON, `{"module": name, "words": [...]}`, sent with the descriptors of the child's standard
input, output and error. The server replies `{"born": pid}`, and `{"ended": pid, "code": code}` when a child has ended.
A command without descriptors kills all children; the server then replies `{"over": true}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forged.launch.daemon_process import environment

ORDER_BYTES_MAX = 1 << 16
DESCRIPTORS = 3
DAEMON = (
    "forged.cli.forged",
    "forged.cli.service.serve",
    "forged.daemon",
    "forged.net.transport.sockets",
    "forged.kernel.store.sqlite",
)
"""The modules of a daemon, also those that it imports late."""
STOP_FILE = b"{}\n"
"""The command that kills all children."""


@dataclass
class ForkedProcess:
    """A forked process, as seen by the test."""

    pid: int
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    returncode: int | None = None
    _saying: asyncio.StreamWriter | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> int:
        """Wait until it has ended, and discard unread output; returns its exit code."""
        await self._ended.wait()
        for end in (self.stdin, self._saying):
            if end is not None:
                end.close()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        """Record its end."""
        self.returncode = code
        self._ended.set()


@dataclass(frozen=True)
class ForkServer:
    """A process that has loaded some modules and forks on command."""

    pid: int
    commands: socket.socket


@contextmanager
def forking_from(*modules: str) -> Iterator[ForkServer]:
    """Run a fork server with these modules until the end of the block."""
    ours, theirs = socket.socketpair()
    command = (sys.executable, "-m", __name__, str(theirs.fileno()), *modules)
    with ours:
        with theirs:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment(), pass_fds=[theirs.fileno()])
        with process:
            try:
                yield ForkServer(process.pid, ours)
            finally:
                # It ends at the end of its command stream.
                ours.shutdown(socket.SHUT_WR)


class ProcessStarter:
    """Starts processes by a fork server from one event loop, and kills them at the end of the block."""

    def __init__(self, warm: ForkServer) -> None:
        self.warm = warm
        self._children: dict[int, ForkedProcess] = {}

    async def __aenter__(self) -> Self:
        reader, self._writer = await asyncio.open_connection(sock=self.warm.commands.dup())
        self._born: asyncio.Queue[int] = asyncio.Queue()
        self._early_ends: dict[int, int] = {}
        self._hearing = asyncio.create_task(self._read_output(reader))
        self._one_at_a_time = asyncio.Lock()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ConnectionError):
            self.warm.commands.sendall(STOP_FILE)
        await self._hearing
        await asyncio.gather(*(child.wait() for child in self._children.values()))
        self._writer.close()

    async def start(self, module: str, *words: str, log: Path) -> ForkedProcess:
        """Run the `main` of a module with these arguments, in a session of its own."""
        command_message = json.dumps({"module": module, "words": words}).encode()
        assert len(command_message) <= ORDER_BYTES_MAX
        (ours, read), (child_output, output) = socket.socketpair(), socket.socketpair()
        async with self._one_at_a_time:
            with read, output, log.open("ab") as errors:
                socket.send_fds(
                    self.warm.commands, [command_message], [read.fileno(), output.fileno(), errors.fileno()]
                )
            pid = await self._born.get()
            assert pid, "the fork server has died; see its error above"
        _, stdin = await asyncio.open_connection(sock=ours)
        stdout, saying = await asyncio.open_connection(sock=child_output)
        child = self._children[pid] = ForkedProcess(pid, stdin, stdout, _saying=saying)
        if pid in self._early_ends:
            child.end(self._early_ends.pop(pid))
        return child

    async def _read_output(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            async for line in reader:
                reply: dict[str, Any] = json.loads(line)
                if "over" in reply:
                    return
                if "born" in reply:
                    self._born.put_nowait(reply["born"])
                elif (child := self._children.get(reply["ended"])) is not None and child.returncode is None:
                    child.end(reply["code"])
                else:
                    self._early_ends[reply["ended"]] = reply["code"]
        # The fork server has died: end all waits.
        self._born.put_nowait(0)
        for child in self._children.values():
            if child.returncode is None:
                child.end(-signal.SIGKILL)


def serve(commands: socket.socket) -> dict[str, Any] | None:
    """Execute commands until their stream ends; returns the command in a child, None in the server."""
    awake, wake = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    poll = select.poll()
    poll.register(commands, select.POLLIN)
    poll.register(awake, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if awake in ready:
            os.read(awake, 512)
            _reap(running, commands)
        if commands.fileno() not in ready:
            continue
        line, descriptors, _, _ = socket.recv_fds(commands, ORDER_BYTES_MAX, DESCRIPTORS)
        if not descriptors:
            _kill_all(running, commands)
            if not line:
                return None
            _send(commands, over=True)
            continue
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _set_up_child(descriptors, awake, wake, commands.detach())
            command_message: dict[str, Any] = json.loads(line)
            return command_message
        running.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        _send(commands, born=pid)


def _kill_all(running: set[int], commands: socket.socket) -> None:
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    while running:
        # The controlling process may be gone.
        with suppress(ConnectionError):
            _reap(running, commands, 0)


def _set_up_child(descriptors: list[int], *others: int) -> None:
    os.setsid()
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
    for descriptor in (*descriptors, *others):
        os.close(descriptor)


def _reap(running: set[int], commands: socket.socket, how: int = os.WNOHANG) -> None:
    for pid in list(running):
        wait_until_killed, status = os.waitpid(pid, how)
        if wait_until_killed:
            running.discard(pid)
            _send(commands, ended=pid, code=os.waitstatus_to_exitcode(status))


def _send(commands: socket.socket, **what: int) -> None:
    commands.sendall(json.dumps(what).encode() + b"\n")


def main() -> None:
    """Run the server, and in its children the commanded module."""
    descriptor, *modules = sys.argv[1:]
    for module in modules:
        import_module(module)
    command_message = serve(socket.socket(fileno=int(descriptor)))
    if command_message is not None:
        sys.argv = [command_message["module"], *command_message["words"]]
        sys.exit(import_module(command_message["module"]).main())


if __name__ == "__main__":
    main()
