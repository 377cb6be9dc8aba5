"""Real connections that record received bytes, and test certificates."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import trustme

from forged.net.transport import tls
from forged.net.transport.port import Address, Listener, Network


class RecordingProtocol(asyncio.Protocol):
    """One end of a connection, which records the received bytes and the end."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.made = asyncio.Event()
        self.heard = asyncio.Event()
        self.received = b""
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.made.set()

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.heard.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)

    @property
    def open_transport(self) -> asyncio.Transport:
        assert self.transport is not None
        return self.transport

    async def hear(self, expected: bytes) -> None:
        """Wait for exactly these bytes."""
        while len(self.received) < len(expected):
            self.heard.clear()
            await self.heard.wait()
        assert self.received == expected


@dataclass
class RecordingConnections:
    """Creates connections and listeners, and closes all of them."""

    accepted: asyncio.Queue[RecordingProtocol] = field(default_factory=asyncio.Queue)
    made: list[RecordingProtocol] = field(default_factory=list)
    listeners: list[Listener] = field(default_factory=list)

    def near(self) -> RecordingProtocol:
        self.made.append(RecordingProtocol())
        return self.made[-1]

    def far(self) -> RecordingProtocol:
        end = self.near()
        self.accepted.put_nowait(end)
        return end

    async def listen(self, network: Network, address: Address) -> Listener:
        return self.keep(await network.listen(address, self.far))

    def keep(self, listener: Listener) -> Listener:
        self.listeners.append(listener)
        return listener

    async def connect(self, network: Network, address: Address) -> tuple[RecordingProtocol, RecordingProtocol]:
        """Connect; returns the near and the far end."""
        near = self.near()
        await network.connect(address, lambda: near)
        far = await self.accepted.get()
        await far.made.wait()
        return near, far

    async def close(self) -> None:
        for listener in self.listeners:
            await listener.close()
        for end in self.made:
            if end.transport is not None:
                end.transport.abort()
                await end.lost


@dataclass(frozen=True)
class Certificates:
    """A certificate authority and the certificates that it issued."""

    directory: Path
    authority: trustme.CA = field(default_factory=trustme.CA)

    @property
    def ca(self) -> Path:
        path = self.directory / "ca.pem"
        self.authority.cert_pem.write_to_path(path)
        return path

    def issue(self, *names: str, common_name: str | None = None) -> tuple[Path, Path]:
        """Issue a certificate; returns its file and its key file."""
        issued = self.authority.issue_cert(*names, common_name=common_name)
        stem = (common_name or names[0]).replace(" ", "-")
        certificate, key = self.directory / f"{stem}.pem", self.directory / f"{stem}.key"
        certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return certificate, key

    def server(self) -> ssl.SSLContext:
        return tls.server_context(*self.issue("localhost", "127.0.0.1"))

    def client(self) -> ssl.SSLContext:
        return tls.client_context(self.ca)
