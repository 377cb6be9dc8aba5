"""The client's end of one connection.

Invariants:
- A link holds nothing that must outlive its connection: pending requests and stream positions belong to the client.
- A link never stops reading. If both ends stopped reading until the other one reads, they would deadlock; so the amount
  that the client sends is limited elsewhere.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from typing import Any, Protocol

from forged.clock import Clock
from forged.errors import ForgedError, PeerError, Unavailable
from forged.net.protocol.messages import (
    VERSION_MAX,
    VERSION_MIN,
    Bye,
    Cancel,
    Ended,
    Facts,
    Failure,
    GapMessage,
    Hello,
    Reply,
    RequestMessage,
    Welcome,
)
from forged.net.transport import tls
from forged.net.transport.connection import Connection, ConnectionLimits
from forged.net.transport.port import Address
from forged.version import VERSION

FRAME_BYTES_CEILING = 1 << 30
"""Larger frames are refused whatever the daemon announces."""


class LinkOwner(Protocol):
    """Receives the messages of a link."""

    def on_outcome(self, link: Link, message: Reply | Failure) -> None:
        """A reply or a failure arrived."""
        ...

    def on_stream(self, message: Facts | GapMessage | Ended) -> None:
        """A message of a stream arrived."""
        ...

    def on_request(self, link: Link, message: RequestMessage) -> None:
        """The daemon sent a request."""
        ...

    def on_cancel(self, link: Link, message: Cancel) -> None:
        """The daemon cancelled a request."""
        ...


class Link(Connection):
    """One connection to a daemon."""

    def __init__(
        self,
        owner: LinkOwner,
        clock: Clock,
        limits: ConnectionLimits,
        address: Address,
        client: bytes,
        token: str | None,
    ) -> None:
        super().__init__(clock, limits)
        loop = asyncio.get_running_loop()
        self.address = address
        self.welcome: asyncio.Future[Welcome] = loop.create_future()
        self.over: asyncio.Future[ForgedError] = loop.create_future()
        self._owner = owner
        self._client = client
        self._token = token

    def opened(self) -> None:
        # The limits before the hello protect a daemon from clients; a client trusts its daemon.
        self.established()
        self.send(Hello(VERSION_MIN, VERSION_MAX, self._client, f"forged-python/{VERSION}", self._token))

    def admits(self) -> bool:
        return True

    def received(self, message: Any) -> None:
        kind = type(message)
        if kind is Reply or kind is Failure:
            self._owner.on_outcome(self, message)
        elif kind is Facts or kind is GapMessage or kind is Ended:
            self._owner.on_stream(message)
        elif kind is RequestMessage:
            self._owner.on_request(self, message)
        elif kind is Cancel:
            self._owner.on_cancel(self, message)
        elif kind is Welcome:
            self._welcomed(message)
        elif kind is Bye:
            self.close(Unavailable("stopping", message.reason or "the daemon is stopping", "reconnect"))
        else:
            raise PeerError("message_unexpected", f"a client cannot receive {kind.__name__}")

    def connection_lost(self, exc: Exception | None) -> None:
        # In TLS 1.3 the daemon checks the client certificate after the handshake, so its refusal ends the connection.
        if self._reason is None and not self.welcome.done() and isinstance(exc, ssl.SSLError):
            self._reason = tls.refusal(self.address, exc)
        super().connection_lost(exc)

    def ended(self, error: ForgedError) -> None:
        if not self.welcome.done():
            self.welcome.set_exception(error)
            self.welcome.exception()  # retrieved, so that asyncio does not warn
        if not self.over.done():
            self.over.set_result(error)

    def _welcomed(self, message: Welcome) -> None:
        if not VERSION_MIN <= message.version <= VERSION_MAX:
            raise PeerError(
                "version_mismatch",
                f"{self.address} speaks version {message.version}, this client {VERSION_MIN} to {VERSION_MAX}",
                "upgrade the older of the two",
            )
        largest = max(self.limits.frame_bytes_max, message.frame_bytes_max)
        self._decoder.frame_bytes_max = min(largest, FRAME_BYTES_CEILING)
        # Sent frames must respect both limits.
        sendable = min(self.limits.frame_bytes_max, message.frame_bytes_max)
        self.limits = replace(self.limits, frame_bytes_max=sendable)
        if not self.welcome.done():
            self.welcome.set_result(message)
