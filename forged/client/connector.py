"""Connecting and reconnecting.

Invariants:
- There is at most one connection.
- Every endpoint is tried before a pause. Pauses grow until a connection lasts, so that neither an absent daemon nor one
  that closes each connection is flooded with attempts.
- An error that would repeat ends the connector; other errors are retried as the policy says.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace

import anyio

from forged.client.connection import Link
from forged.clock import Clock
from forged.errors import ConfigError, ForgedError, RequestRefused, Unavailable
from forged.net.protocol.messages import Bye
from forged.net.transport.port import Address, Network
from forged.retry import RetryPolicy

SWEEP_INTERVAL_S = 1.0
GOODBYE_TIMEOUT_S = 1.0
ATTEMPT_S = 5.0
"""Timeout of one attempt after the first connection."""
START_HINT = "start one with `forged run`, or use the endpoint of a daemon that runs"
LASTING_S = 1.0
"""After a connection that lasted this long the next attempt needs no pause."""

_FINAL_CODES = frozenset({"version_mismatch", "client_invalid", "tls_failed"})


class Connector:
    """Keeps a connection to one of several endpoints; calls `connected` for each one, `disconnected` after it, and
    `ended` at the end."""

    def __init__(
        self,
        endpoints: Sequence[Address],
        network: Network,
        clock: Clock,
        source: random.Random,
        policy: RetryPolicy,
        connect_timeout_s: float,
        *,
        make_link: Callable[[Address], Link],
        connected: Callable[[Link], None],
        disconnected: Callable[[], None],
        ended: Callable[[ForgedError], None],
    ) -> None:
        self.endpoints = tuple(endpoints)
        self.link: Link | None = None
        self.end: ForgedError | None = None
        """Why it has stopped connecting; None while it connects."""
        self._network = network
        self._clock = clock
        self._source = source
        self._policy = policy
        self._connect_timeout_s = connect_timeout_s
        # Every endpoint must be tried within the timeout of the first connection.
        self._attempt_s = connect_timeout_s / (len(self.endpoints) + 1)
        self._make_link = make_link
        self._connected = connected
        self._disconnected = disconnected
        self._ended = ended
        self._turn = 0
        self._failures: dict[Address, str] = {}
        self._changed = anyio.Event()

    @property
    def last_failures(self) -> str:
        """Why there is no connection, in words; empty if unknown."""
        return "; ".join(self._failures.values())

    async def first(self) -> None:
        """Wait for the first connection; raise if there is none in time."""
        with anyio.move_on_after(self._connect_timeout_s):
            while self.link is None and self.end is None:
                await self._changed.wait()
        if self.end is not None:
            raise copy(self.end)
        if self.link is None:
            raise self._no_daemon()

    async def run(self) -> None:
        """Connect and reconnect until an error is final or the retry policy ends."""
        pauses = self._pauses()
        while self.end is None:
            if await self._round():
                pauses = self._pauses()
                continue
            pause_s = next(pauses, None)
            if pause_s is None:
                self.finish(self._no_daemon())
            elif self.end is None:
                await anyio.sleep(pause_s)

    def finish(self, error: ForgedError) -> None:
        """Stop connecting; the first error is kept."""
        if self.end is None:
            self.end = error
            self._ended(error)
            self._notify()

    async def leave(self, acknowledged: int) -> None:
        """Send goodbye, and wait briefly until it is sent."""
        link = self.link
        if link is None or link.lost:
            return
        link.send(Bye(acknowledged))
        link.close()
        await asyncio.wait([link.over], timeout=GOODBYE_TIMEOUT_S)
        if not link.lost:
            link.abort()

    async def _round(self) -> bool:
        """Try every endpoint, starting after the last one tried; returns whether a connection has lasted."""
        for _ in self.endpoints:
            address = self.endpoints[self._turn % len(self.endpoints)]
            self._turn += 1
            if await self._visit(address):
                return True
            if self.end is not None:
                break
        return False

    async def _visit(self, address: Address) -> bool:
        """Connect and wait until the connection ends; returns whether it has lasted."""
        try:
            link = await self._connect(address)
        except ForgedError as error:
            self._failed(address, error)
            return False
        since = self._clock.monotonic()
        self._attempt_s = ATTEMPT_S
        self._failures.clear()
        self._failed(address, await self._stay(link))
        return self._clock.monotonic() - since >= LASTING_S

    async def _connect(self, address: Address) -> Link:
        attempt_s = self._attempt_s
        made: list[Link] = []

        def make() -> Link:
            made.append(self._make_link(address))
            return made[-1]

        try:
            with anyio.fail_after(attempt_s):
                await self._network.connect(address, make)
                await made[-1].welcome
        except BaseException as error:
            for link in made:
                link.abort()
            if isinstance(error, TimeoutError):
                raise _silent(address, attempt_s) from None
            raise
        return made[-1]

    async def _stay(self, link: Link) -> ForgedError:
        """Serve the connection until it ends; returns the reason."""
        self.link = link
        self._connected(link)
        self._notify()
        try:
            while not link.over.done():
                await asyncio.wait([link.over], timeout=SWEEP_INTERVAL_S)
                link.sweep(self._clock.monotonic())
            return link.over.result()
        finally:
            self.link = None
            if not link.lost:
                link.abort()
            self._notify()
            self._disconnected()

    def _failed(self, address: Address, error: ForgedError) -> None:
        # A TLS port closes a plain connection without an explanation.
        plain = address.scheme == "tcp" and error.code == "connection_lost"
        hint = f" (for TLS use {replace(address, scheme='tls')})" if plain else ""
        self._failures[address] = f"{error.message}{hint}"
        if isinstance(error, (ConfigError, RequestRefused)) or error.code in _FINAL_CODES:
            self.finish(error)

    def _pauses(self) -> Iterator[float]:
        return self._policy.delays(self._source.random)

    def _no_daemon(self) -> Unavailable:
        where = ", ".join(map(str, self.endpoints))
        reason = f": {self.last_failures}" if self.last_failures else ""
        return Unavailable("no_daemon", f"no daemon on {where}{reason}", START_HINT)

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


def _silent(address: Address, waited_s: float) -> Unavailable:
    return Unavailable(
        "connect_timeout", f"{address} did not answer the hello within {waited_s:g} s", "is it a forged daemon?"
    )
