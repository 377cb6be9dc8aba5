"""The network port: listen, connect, identify peers.

Code above this port uses asyncio transports and protocols, never sockets, so that the same connections run over TCP,
TLS, Unix sockets and the simulated network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Literal, Protocol
from urllib.parse import SplitResult, urlsplit

from forged.errors import ConfigError

Scheme = Literal["unix", "tcp", "tls"]
ProtocolFactory = Callable[[], asyncio.Protocol]

IPV6_PREFIX_BITS = 64
"""One host usually has a whole network of this size."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen at or connect to: a path for `unix`, host and port for `tcp` and `tls`."""

    scheme: Scheme
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `unix:///path`, `tcp://host:port`, `tls://host:port`, or `host:port` (tcp)."""
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
            f"address {text!r} is invalid",
            "use unix:///path, tcp://host:port or tls://host:port",
        )

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Peer:
    """What the network knows about the peer before its first message."""

    scheme: Scheme
    address: str
    loopback: bool = False
    uid: int | None = None
    """The user of the peer's process, for a Unix socket or a loopback address; None if the kernel does not say."""
    certificate_name: str | None = None
    """The name in the verified certificate, empty if it has none; None without a certificate."""

    @property
    def source(self) -> str:
        """Whose share the peer uses before its principal is known: its user, if that is known, or its address."""
        if self.scheme == "unix":
            return f"unix:{self.uid}"
        if self.loopback and self.uid is not None:
            # All users of this host have the same address.
            return f"loopback:{self.uid}"
        return _network(self.address.rpartition(":")[0].strip("[]"))


def _network(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    prefix = int(address) >> (128 - IPV6_PREFIX_BITS) << (128 - IPV6_PREFIX_BITS)
    return f"{IPv6Address(prefix)}/{IPV6_PREFIX_BITS}"


class Listener(Protocol):
    """A listening address."""

    @property
    def address(self) -> Address:
        """The actual address; port 0 is replaced by the assigned port."""
        ...

    def descriptors(self) -> list[int]:
        """The file descriptors of its sockets, if it has sockets."""
        ...

    async def close(self) -> None:
        """Stop accepting; existing connections stay."""
        ...


class Network(Protocol):
    """Makes connections of one host."""

    async def listen(self, address: Address, factory: ProtocolFactory) -> Listener:
        """Listen, and call `factory` for every new connection."""
        ...

    async def connect(self, address: Address, factory: ProtocolFactory) -> asyncio.Transport:
        """Connect. Raises `Unavailable` (no answer, refused, timeout) or `PeerError` (TLS failed)."""
        ...

    async def refuses(self, address: Address, seen_at: str) -> bool:
        """Whether the host that a peer was seen at (its `Peer.address`) refuses connections to this TCP address.

        False, without a connection attempt, if the address is not that host's.
        """
        ...

    def peer(self, transport: asyncio.BaseTransport) -> Peer:
        """The peer of a transport that this network made."""
        ...
