"""A listening Unix socket that can be closed at any moment without leaving a connection behind.

`asyncio.Server` loses, unclosed, a connection that it has accepted in the turn of the loop in which it is closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

Treat = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

BACKLOG = 1024


class UnixListener:
    """Runs the handler for each connection in a task of its own; the connection ends with it."""

    def __init__(self, path: Path, treat: Treat) -> None:
        self.accepted = 0
        self._treat = treat
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._sock.bind(str(path))
        self._sock.listen(BACKLOG)
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    async def close(self) -> None:
        """Stop accepting, and end all connections."""
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _accept(self) -> None:
        connection, _ = self._sock.accept()
        self.accepted += 1
        task = asyncio.create_task(self._enter(connection))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        # A task that is cancelled before its first step does nothing, not even its `finally`.
        task.add_done_callback(lambda _: connection.close())

    async def _enter(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            await self._treat(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)
