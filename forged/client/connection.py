"""The client's end of one connection.

Law: a link lives as long as its connection and holds nothing that must outlive it; what waits for answers, and where
streams stand, is the client's. It never stops reading: were both ends to wait until the other reads, nobody would, so
what it sends is bounded elsewhere.
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
"""However large the frames are that a daemon announces."""


class LinkOwner(Protocol):
    """Who is told what arrives."""

    def on_outcome(self, link: Link, message: Reply | Failure) -> None:
        """An answer."""
        ...

    def on_stream(self, message: Facts | GapMessage | Ended) -> None:
        """Something of a stream."""
        ...

    def on_request(self, link: Link, message: RequestMessage) -> None:
        """The daemon asks."""
        ...

    def on_cancel(self, link: Link, message: Cancel) -> None:
        """The daemon no longer wants to know."""
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
        # A client need not fear what its daemon sends as its first word, and the hello's own limit is the daemon's.
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
            self.close(Unavailable("stopping", message.reason or "the daemon said goodbye", "reconnect"))
        else:
            raise PeerError("message_unexpected", f"{kind.__name__} is not for a client to receive")

    def connection_lost(self, exc: Exception | None) -> None:
        # With TLS 1.3 the daemon judges our certificate after the handshake, so its refusal comes as a lost connection.
        if self._reason is None and not self.welcome.done() and isinstance(exc, ssl.SSLError):
            self._reason = tls.refusal(self.address, exc)
        super().connection_lost(exc)

    def ended(self, error: ForgedError) -> None:
        if not self.welcome.done():
            self.welcome.set_exception(error)
            self.welcome.exception()  # looked at, so that nobody is told it was never retrieved
        if not self.over.done():
            self.over.set_result(error)

    def _welcomed(self, message: Welcome) -> None:
        if not VERSION_MIN <= message.version <= VERSION_MAX:
            raise PeerError(
                "version_mismatch",
                f"{self.address} speaks version {message.version}, this end {VERSION_MIN} to {VERSION_MAX}",
                "upgrade the older of the two",
            )
        largest = max(self.limits.frame_bytes_max, message.frame_bytes_max)
        self._decoder.frame_bytes_max = min(largest, FRAME_BYTES_CEILING)
        # What is sent must fit the daemon's frames as well as keep this end's own limit.
        sendable = min(self.limits.frame_bytes_max, message.frame_bytes_max)
        self.limits = replace(self.limits, frame_bytes_max=sendable)
        if not self.welcome.done():
            self.welcome.set_result(message)
