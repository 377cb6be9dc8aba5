"""A daemon in this process that goes and comes back, as clients see one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forged.clock import SystemClock
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.kernel.store.memory import MemoryStore
from forged.kernel.store.port import Store
from forged.net.transport.sockets import SystemNetwork
from forged.retry import RetryPolicy

SOON = RetryPolicy(attempts=None, delay_s=0.005, exponential=True, delay_max_s=0.05, jitter=0.5)
"""For clients in tests: knocks often, because the daemon comes back within milliseconds."""

Extend = Callable[[Daemon], None]


class ReusableStore(MemoryStore):
    """To its daemons what a file is: it survives them."""

    async def close(self) -> None:
        """Stay open for the next daemon."""


@dataclass
class DaemonRunner:
    """Where a daemon lives: its socket and store outlive it."""

    config: Config
    store: Store = field(default_factory=lambda: ReusableStore("this history"))
    extend: Extend = lambda daemon: None
    network: SystemNetwork = field(default_factory=SystemNetwork)
    starts: int = 0
    _daemon: Daemon | None = None
    _leave: asyncio.Event = field(default_factory=asyncio.Event)
    _life: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        return f"unix://{self.config.socket}"

    @property
    def daemon(self) -> Daemon:
        assert self._daemon is not None
        return self._daemon

    async def open(self) -> Daemon:
        """Start a daemon; the store is as the last one left it."""
        ready: asyncio.Future[Daemon] = asyncio.get_running_loop().create_future()
        self._leave.clear()
        self._life = asyncio.create_task(self._live(ready))
        self._life.add_done_callback(lambda _: ready.cancel())
        try:
            self._daemon = await ready
        except asyncio.CancelledError:
            await self._life  # it ended before it was ready, and says why
            raise
        self.starts += 1
        return self._daemon

    async def close(self) -> None:
        """Stop the daemon in good order; nothing to do when there is none."""
        self._leave.set()
        life, self._life, self._daemon = self._life, None, None
        if life is not None:
            await life

    async def reopen(self, store: Store | None = None, **changes: Any) -> Daemon:
        """Have another daemon at the same socket."""
        await self.close()
        self.store = store or self.store
        self.config = replace(self.config, **changes)
        return await self.open()

    async def _live(self, ready: asyncio.Future[Daemon]) -> None:
        async def open_store() -> Store:
            return self.store

        ports = Ports(SystemClock(), self.network, os.getpid(), os.getuid(), open_store)
        async with Daemon.running(self.config, ports, extend=self.extend) as daemon:
            ready.set_result(daemon)
            await self._leave.wait()


def config_in(directory: Path, **changes: Any) -> Config:
    """Settings of a daemon that lives in a directory, by default on a Unix socket alone. Makes the directory."""
    directory.mkdir(exist_ok=True)
    config = Config(data_dir=str(directory), socket=str(directory / "forged.sock"), listen=(), drain_timeout_s=0.2)
    return replace(config, **changes)
