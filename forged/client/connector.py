"""Staying connected.

Law: there is one connection at a time. Every endpoint has its turn before a pause, and pauses grow until a connection
has lasted, so that neither a daemon that is away nor one that drops whom it has just greeted is stormed. What would end
the same way again is the end; everything else is tried for as long as the policy says.
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
"""How long an endpoint may take to answer, once there has been a connection."""
LASTING_S = 1.0
"""A connection that held for so long was a good one: the next attempt needs no pause."""

_FINAL_CODES = frozenset({"version_mismatch", "client_invalid", "tls_failed"})


class Connector:
    """Connects to one of several endpoints, over and over; `connected` and `ended` are told what becomes of it."""

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
        ended: Callable[[ForgedError], None],
    ) -> None:
        self.endpoints = tuple(endpoints)
        self.link: Link | None = None
        self.end: ForgedError | None = None
        """Why nobody will connect any more; None while somebody does."""
        self._network = network
        self._clock = clock
        self._source = source
        self._policy = policy
        self._connect_timeout_s = connect_timeout_s
        # So that every endpoint has had its turn before the time for the first connection is over.
        self._attempt_s = connect_timeout_s / (len(self.endpoints) + 1)
        self._make_link = make_link
        self._connected = connected
        self._ended = ended
        self._turn = 0
        self._failures: dict[Address, str] = {}
        self._changed = anyio.Event()

    @property
    def trouble(self) -> str:
        """Why there is no connection, in words; empty when nothing is known."""
        return "; ".join(self._failures.values())

    async def first(self) -> None:
        """Wait for the first connection, or raise why there is none."""
        with anyio.move_on_after(self._connect_timeout_s):
            while self.link is None and self.end is None:
                await self._changed.wait()
        if self.end is not None:
            raise copy(self.end)
        if self.link is None:
            raise self._nobody_there()

    async def run(self) -> None:
        """Connect, and connect again when the connection is lost, until that makes no sense any more."""
        pauses = self._pauses()
        while self.end is None:
            if await self._round():
                pauses = self._pauses()
                continue
            pause_s = next(pauses, None)
            if pause_s is None:
                self.finish(self._nobody_there())
            elif self.end is None:
                await anyio.sleep(pause_s)

    def finish(self, error: ForgedError) -> None:
        """Connect no more. The first reason is the one that counts."""
        if self.end is None:
            self.end = error
            self._ended(error)
            self._notify()

    async def leave(self, acknowledged: int) -> None:
        """Say goodbye, and wait a moment until it has been sent."""
        link = self.link
        if link is None or link.lost:
            return
        link.send(Bye(acknowledged))
        link.close()
        await asyncio.wait([link.over], timeout=GOODBYE_TIMEOUT_S)
        if not link.lost:
            link.abort()

    async def _round(self) -> bool:
        """Give every endpoint a turn, beginning behind the last one; tells whether a connection has lasted."""
        for _ in self.endpoints:
            address = self.endpoints[self._turn % len(self.endpoints)]
            self._turn += 1
            if await self._visit(address):
                return True
            if self.end is not None:
                break
        return False

    async def _visit(self, address: Address) -> bool:
        """Connect and stay until the connection is over; tells whether it has lasted."""
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
        """Look after the connection until it is over, and return why it is."""
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

    def _failed(self, address: Address, error: ForgedError) -> None:
        # A port for TLS closes on whoever does not speak it, without a word that they would understand.
        plain = address.scheme == "tcp" and error.code == "connection_lost"
        hint = f" (if it wants TLS, write {replace(address, scheme='tls')})" if plain else ""
        self._failures[address] = f"{error.message}{hint}"
        if isinstance(error, (ConfigError, RequestRefused)) or error.code in _FINAL_CODES:
            self.finish(error)

    def _pauses(self) -> Iterator[float]:
        return self._policy.delays(self._source.random)

    def _nobody_there(self) -> Unavailable:
        where = ", ".join(map(str, self.endpoints))
        reason = f": {self.trouble}" if self.trouble else ""
        return Unavailable("no_daemon", f"no daemon on {where}{reason}", "start one with `forged run`")

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


def _silent(address: Address, waited_s: float) -> Unavailable:
    return Unavailable(
        "connect_timeout", f"{address} did not answer the hello within {waited_s:g} s", "is it a forged daemon?"
    )
