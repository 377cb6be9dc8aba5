"""A daemon in this process that can be stopped and restarted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forged.catalog.files.stored_files import StoredCheckpointFiles
from forged.clock import SystemClock
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.host.agent import HostAgent, NoHost
from forged.kernel.store.memory import MemoryStore
from forged.kernel.store.port import Store
from forged.net.transport.sockets import SystemNetwork
from forged.retry import RetryPolicy

SOON = RetryPolicy(attempts=None, delay_s=0.005, exponential=True, delay_max_s=0.05, jitter=0.5)
"""Short pauses, because daemons in tests restart within milliseconds."""

Extend = Callable[[Daemon], None]


class ReusableStore(MemoryStore):
    """A store that outlives its daemons, like a file."""

    async def close(self) -> None:
        """Do nothing: the next daemon uses the store."""


@dataclass
class DaemonRunner:
    """Starts and stops daemons on one socket and store."""

    config: Config
    store: Store = field(default_factory=lambda: ReusableStore("this history"))
    extend: Extend = lambda daemon: None
    network: SystemNetwork = field(default_factory=SystemNetwork)
    host: HostAgent = field(default_factory=NoHost)
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
        """Start a daemon on the store of the previous one."""
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
        """Stop the daemon if it runs."""
        self._leave.set()
        life, self._life, self._daemon = self._life, None, None
        if life is not None:
            await life

    async def reopen(self, store: Store | None = None, **changes: Any) -> Daemon:
        """Restart with another store or other settings on the same socket."""
        await self.close()
        self.store = store or self.store
        self.config = replace(self.config, **changes)
        return await self.open()

    async def _live(self, ready: asyncio.Future[Daemon]) -> None:
        async def open_store() -> Store:
            return self.store

        ports = Ports(
            SystemClock(),
            self.network,
            os.getpid(),
            os.getuid(),
            open_store,
            host=self.host,
            checkpoint_files=StoredCheckpointFiles(),
        )
        async with Daemon.running(self.config, ports, extend=self.extend) as daemon:
            ready.set_result(daemon)
            await self._leave.wait()


def config_in(directory: Path, **changes: Any) -> Config:
    """Settings of a daemon in a directory, which is created; by default with a Unix socket only."""
    directory.mkdir(exist_ok=True)
    config = Config(data_dir=str(directory), socket=str(directory / "forged.sock"), listen=(), drain_timeout_s=0.2)
    return replace(config, **changes)
