"""A daemon in a process of its own: its store is on the disk, and it is asked over its Unix socket."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forged.daemon import Daemon

SERVE = "--serve"


@contextmanager
def daemon_process(module: str, directory: str) -> Iterator[str]:
    """Run `module --serve directory`, which calls `serve`, for the block; yields the daemon's endpoint."""
    command = [sys.executable, "-m", module, SERVE, directory]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("the daemon of this benchmark did not start")
            yield f"unix://{directory}/s"
        finally:
            process.kill()


def serve(directory: str, extend: Callable[[Daemon], None], **ports: Any) -> None:
    """Run a daemon until it is killed; `ports` replace those of a real one."""
    # With the event loop and the garbage collection that it has in earnest.
    from forged.cli.service.serve import _collect_seldom, event_loop

    _collect_seldom()
    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(_run(directory, extend, ports))


async def _run(directory: str, extend: Callable[[Daemon], None], ports: dict[str, Any]) -> None:
    from forged.clock import SystemClock
    from forged.config import Config
    from forged.daemon import Daemon, Ports
    from forged.kernel.store.sqlite import SqliteStore
    from forged.net.transport.sockets import SystemNetwork

    async def open_store() -> SqliteStore:
        return await SqliteStore.open(Path(directory) / "store.db", changes_max=0)

    config = Config(data_dir=directory, socket=f"{directory}/s", listen=())
    given = Ports(SystemClock(), SystemNetwork(), os.getpid(), os.getuid(), open_store, **ports)
    async with Daemon.running(config, given, extend=extend):
        print("ready", flush=True)
        await asyncio.Event().wait()
