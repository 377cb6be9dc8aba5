"""The port through which connections are made.

Law: everything above this port deals in asyncio transports and protocols and never sees a socket, so that the same
connections run over TCP, TLS, Unix sockets and the simulated network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import SplitResult, urlsplit

from forged.errors import ConfigError

Scheme = Literal["unix", "tcp", "tls"]
ProtocolFactory = Callable[[], asyncio.Protocol]


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen or connect: a socket path for `unix`, host and port for the others."""

    scheme: Scheme
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `unix:///path`, `tcp://host:port`, `tls://host:port`, or a bare `host:port` (which is tcp)."""
        try:
            parts = urlsplit(text if "://" in text else f"tcp://{text}")
            port = parts.port
        except ValueError:
            parts, port = SplitResult("", "", "", "", ""), None
        if parts.scheme == "unix" and parts.path and not parts.netloc:
            return cls("unix", path=parts.path)
        if parts.scheme in ("tcp", "tls") and parts.hostname and port is not None:
            return cls("tls" if parts.scheme == "tls" else "tcp", host=parts.hostname, port=port)
        raise ConfigError(
            "address_invalid",
            f"{text!r} is not an address",
            "write unix:///path, tcp://host:port or tls://host:port",
        )

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Peer:
    """What the network knows of the other end before it says a word."""

    scheme: Scheme
    address: str
    loopback: bool = False
    uid: int | None = None
    certificate_name: str | None = None
    """The name in a verified certificate, empty where that has none; None without a certificate."""


class Listener(Protocol):
    """An open door."""

    @property
    def address(self) -> Address:
        """Where it really listens: port 0 has become a port."""
        ...

    def descriptors(self) -> list[int]:
        """The file descriptors of its sockets; none where there are no sockets."""
        ...

    async def close(self) -> None:
        """Accept no more. Connections that were made stay."""
        ...


class Network(Protocol):
    """Makes connections. One per host: in the simulation it is what partitions act on."""

    async def listen(self, address: Address, factory: ProtocolFactory) -> Listener:
        """Call `factory` for every connection that arrives."""
        ...

    async def connect(self, address: Address, factory: ProtocolFactory) -> asyncio.Transport:
        """Connect, or raise `Unavailable` (nobody answers; refused; in time out) or `PeerError` (TLS not accepted)."""
        ...

    def peer(self, transport: asyncio.BaseTransport) -> Peer:
        """Who is at the other end of a transport that this network made."""
        ...
