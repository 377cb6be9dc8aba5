"""Processes forked from a warm one: a process starts in milliseconds, where imports alone take half a second.

Law: the warm process has one thread and no event loop, so what it forks is as fresh as what a shell starts. It outlives
none of its children: when whoever gives the orders is gone, they are killed.

An order is a line of JSON, `{"module": name, "words": [...]}`, and comes with the descriptors that the child reads
from, writes to and complains to. It is answered with `{"born": pid}`; whenever a child has ended, `{"ended": pid,
"code": code}` tells what of, as `subprocess` tells it. Whatever comes without descriptors ends all who live; `{"over":
true}` is the last that is said of them.
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

from forged.demo.processes import environment

ORDER_BYTES_MAX = 1 << 16
DESCRIPTORS = 3
DAEMON = (
    "forged.cli.forged",
    "forged.cli.service.serve",
    "forged.daemon",
    "forged.net.transport.sockets",
    "forged.kernel.store.sqlite",
)
"""What a daemon is made of, with what it imports late."""
ENOUGH = b"{}\n"
"""The order that ends all who live."""


@dataclass
class Child:
    """A process, from the outside."""

    pid: int
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    returncode: int | None = None
    _saying: asyncio.StreamWriter | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> int:
        """Wait until it is dead; what it said and nobody has read is gone then. Returns what it died of."""
        await self._ended.wait()
        for end in (self.stdin, self._saying):
            if end is not None:
                end.close()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        """It is dead."""
        self.returncode = code
        self._ended.set()


@dataclass(frozen=True)
class ForkServer:
    """A process that has loaded some modules, and forks what it is told to."""

    pid: int
    orders: socket.socket


@contextmanager
def forking_from(*modules: str) -> Iterator[ForkServer]:
    """Have one that loads these, until the end of the block."""
    ours, theirs = socket.socketpair()
    command = (sys.executable, "-m", __name__, str(theirs.fileno()), *modules)
    with ours:
        with theirs:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment(), pass_fds=[theirs.fileno()])
        with process:
            try:
                yield ForkServer(process.pid, ours)
            finally:
                # It ends when it hears that there will be no more orders.
                ours.shutdown(socket.SHUT_WR)


class ProcessStarter:
    """The orders to a warm process from one event loop; who is born there does not outlive it."""

    def __init__(self, warm: ForkServer) -> None:
        self.warm = warm
        self._children: dict[int, Child] = {}

    async def __aenter__(self) -> Self:
        reader, self._writer = await asyncio.open_connection(sock=self.warm.orders.dup())
        self._born: asyncio.Queue[int] = asyncio.Queue()
        self._told: dict[int, int] = {}
        self._hearing = asyncio.create_task(self._hear(reader))
        self._one_at_a_time = asyncio.Lock()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ConnectionError):
            self.warm.orders.sendall(ENOUGH)
        await self._hearing
        await asyncio.gather(*(child.wait() for child in self._children.values()))
        self._writer.close()

    async def start(self, module: str, *words: str, log: Path) -> Child:
        """Run the `main` of a module with these words, in a session of its own."""
        order = json.dumps({"module": module, "words": words}).encode()
        assert len(order) <= ORDER_BYTES_MAX
        (ours, read), (heard, said) = socket.socketpair(), socket.socketpair()
        async with self._one_at_a_time:
            with read, said, log.open("ab") as complaints:
                socket.send_fds(self.warm.orders, [order], [read.fileno(), said.fileno(), complaints.fileno()])
            pid = await self._born.get()
            assert pid, "the warm process is gone, and says above why"
        _, stdin = await asyncio.open_connection(sock=ours)
        stdout, saying = await asyncio.open_connection(sock=heard)
        child = self._children[pid] = Child(pid, stdin, stdout, _saying=saying)
        if pid in self._told:
            child.end(self._told.pop(pid))
        return child

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            async for line in reader:
                told: dict[str, Any] = json.loads(line)
                if "over" in told:
                    return
                if "born" in told:
                    self._born.put_nowait(told["born"])
                elif (child := self._children.get(told["ended"])) is not None and child.returncode is None:
                    child.end(told["code"])
                else:
                    self._told[told["ended"]] = told["code"]
        # The warm process is gone: nobody waits for what it does not say any more.
        self._born.put_nowait(0)
        for child in self._children.values():
            if child.returncode is None:
                child.end(-signal.SIGKILL)


def serve(orders: socket.socket) -> dict[str, Any] | None:
    """Do what is ordered until nobody orders any more; in a child, returns what it is to be."""
    awake, wake = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living: set[int] = set()
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    poll.register(awake, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if awake in ready:
            os.read(awake, 512)
            _bury(living, orders)
        if orders.fileno() not in ready:
            continue
        line, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, DESCRIPTORS)
        if not descriptors:
            _end_all(living, orders)
            if not line:
                return None
            _tell(orders, over=True)
            continue
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(descriptors, awake, wake, orders.detach())
            order: dict[str, Any] = json.loads(line)
            return order
        living.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        _tell(orders, born=pid)


def _end_all(living: set[int], orders: socket.socket) -> None:
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    while living:
        # Nobody may be there any more to hear of it.
        with suppress(ConnectionError):
            _bury(living, orders, 0)


def _become(descriptors: list[int], *others: int) -> None:
    os.setsid()
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
    for descriptor in (*descriptors, *others):
        os.close(descriptor)


def _bury(living: set[int], orders: socket.socket, how: int = os.WNOHANG) -> None:
    for pid in list(living):
        dead, status = os.waitpid(pid, how)
        if dead:
            living.discard(pid)
            _tell(orders, ended=pid, code=os.waitstatus_to_exitcode(status))


def _tell(orders: socket.socket, **what: int) -> None:
    orders.sendall(json.dumps(what).encode() + b"\n")


def main() -> None:
    """Be the warm process, and in its children whatever was ordered."""
    descriptor, *modules = sys.argv[1:]
    for module in modules:
        import_module(module)
    order = serve(socket.socket(fileno=int(descriptor)))
    if order is not None:
        sys.argv = [order["module"], *order["words"]]
        sys.exit(import_module(order["module"]).main())


if __name__ == "__main__":
    main()
