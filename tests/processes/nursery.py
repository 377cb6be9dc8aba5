"""Daemons forked from a warm process: one starts in milliseconds, where imports alone take a quarter of a second.

Law: the warm process has one thread and no event loop, so what it forks is as fresh as what a shell starts. It outlives
none of its daemons: when whoever gives the orders is gone, they are killed.

Orders and answers are lines of JSON: `{"start": [arguments], "log": path}` is answered with the process id, and
`{"kill": pid}`, once it is dead, with what it died of, as `subprocess` tells it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forged.cli import forged, serve

LOADED = serve
"""What a daemon is made of is loaded once, for all of them."""


class Nursery:
    """The orders to a warm process."""

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", __name__)
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._process.communicate(b"")  # closes its input, and waits

    async def start(self, arguments: Sequence[str], log: Path) -> int:
        """Run `forged` with these arguments; returns its process id."""
        pid: int = await self._order(start=arguments, log=str(log))
        return pid

    async def kill(self, pid: int) -> int:
        """Kill it with -9, and wait until it is dead; returns what it died of."""
        status: int = await self._order(kill=pid)
        return status

    async def _order(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return json.loads(await self._process.stdout.readline())


def main() -> None:
    """Do what is ordered until nobody orders any more."""
    living: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            answer = _fork(order["start"], order["log"])
            living.add(answer)
        else:
            living.discard(order["kill"])
            answer = _kill(order["kill"])
        print(answer, flush=True)
    for pid in living:
        _kill(pid)


def _fork(arguments: Sequence[str], log: str) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _become_a_daemon(log)
            code = forged.main(arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def _become_a_daemon(log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _kill(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _warm_up() -> None:
    """Import what `forged run` imports late."""
    import forged.daemon
    import forged.net.sockets
    import forged.store.sqlite  # noqa: F401


if __name__ == "__main__":
    _warm_up()
    main()
