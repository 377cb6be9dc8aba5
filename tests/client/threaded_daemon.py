"""A daemon for tests that have no event loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from forged.client import BlockingClient
from forged.daemon import Daemon
from forged.kernel.messages import Call
from tests.client.daemon_runner import SOON, DaemonRunner, config_in
from tests.client.example_messages import ExampleRequest, ExampleSignal

P = ParamSpec("P")
T = TypeVar("T")


class EventLoopThread:
    """An event loop in another thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await a call on the loop and return its result."""

        async def run() -> T:
            return await function(*args, **kwargs)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class ThreadedDaemon(EventLoopThread):
    """A daemon on a loop in another thread."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.heard: list[Any] = []
        self.runner: DaemonRunner = self.call(self._open, directory)

    @property
    def socket(self) -> str:
        return self.runner.config.socket

    def close(self) -> None:
        self.call(self.runner.close)
        self.end()

    def client(self, **options: Any) -> BlockingClient:
        return BlockingClient(self.runner.endpoint, **({"reconnect": SOON} | options))

    async def subscriptions(self) -> int:
        """The number of streams of all clients."""
        return sum(len(session._streams) for session in self.runner.daemon.server.sessions)

    async def ask(self) -> Any:
        """Send a request from the daemon to its only client."""
        (session,) = self.runner.daemon.server.sessions
        number, answer = session.calls.open(ExampleRequest("life"), 60.0, None)
        session.send(session.calls.message(number))
        return await answer

    async def _open(self, directory: Path) -> DaemonRunner:
        runner = DaemonRunner(config_in(directory), extend=self._extend)
        await runner.open()
        return runner

    def _extend(self, daemon: Daemon) -> None:
        async def ponder(request: ExampleRequest, call: Call) -> str:
            await asyncio.Event().wait()
            return ""

        daemon.bus.serve(ExampleRequest, ponder, owner="a test")
        daemon.bus.on_signal(ExampleSignal, lambda signal, call: self.heard.append(signal), name="a test")
