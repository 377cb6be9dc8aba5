"""A proxy between clients and a daemon that cuts connections at chosen messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from forged.net.protocol.messages import decode
from tests.client.unix_listener import UnixListener

Way = Literal["up", "down"]
Rule = Callable[[Way, Any], bool]
"""Whether the connection is cut in place of passing this message on; `up` is towards the daemon."""


def pass_all(way: Way, message: Any) -> bool:
    return False


def cut_once(way: Way, kind: type[Any], when: Callable[[Any], bool] = lambda message: True) -> Rule:
    """Cut at the first message of this kind in this direction."""
    done = False

    def rule(its_way: Way, message: Any) -> bool:
        nonlocal done
        cut = not done and its_way == way and isinstance(message, kind) and when(message)
        done = done or cut
        return cut

    return rule


class Proxy:
    """A Unix socket that leads to another one."""

    def __init__(self, path: Path, target: str) -> None:
        self.endpoint = f"unix://{path}"
        self.rule: Rule = pass_all
        self.cuts = 0
        self.seen: list[tuple[Way, Any]] = []
        self._target = target
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._door = UnixListener(path, self._serve)

    async def close(self) -> None:
        await self._door.close()

    @property
    def connections(self) -> int:
        """The number of accepted connections."""
        return self._door.accepted

    def cut(self) -> None:
        """Cut all connections now."""
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        pair = (writer, far_writer)
        self._open |= dict.fromkeys(pair)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_on("up", reader, far_writer, pair))
                tasks.create_task(self._pass_on("down", far_reader, writer, pair))
        finally:
            for one in pair:
                del self._open[one]

    async def _pass_on(
        self,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pair: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        try:
            while True:
                header = await reader.readexactly(4)
                payload = await reader.readexactly(int.from_bytes(header, "big"))
                message = decode(payload)
                if self.rule(way, message):
                    self.cuts += 1
                    return
                self.seen.append((way, message))
                writer.write(header + payload)
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            for one in pair:
                one.transport.abort()
