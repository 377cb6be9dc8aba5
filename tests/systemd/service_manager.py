"""A fake systemd that receives the messages of `sd_notify`."""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from forged.systemd.notify import Notifier

WAIT_MAX_S = 30.0
DATAGRAM_BYTES_MAX = 4096


class FakeServiceManager:
    """The notification socket: at a path, or abstract if the address begins with @."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.environment = {"NOTIFY_SOCKET": address}
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    def __enter__(self) -> Self:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    @property
    def notifier(self) -> Notifier:
        return Notifier.from_environment(dict(self.environment))

    def receive(self) -> list[str]:
        """Wait for a message; returns its lines."""
        self._socket.settimeout(WAIT_MAX_S)
        return self._socket.recv(DATAGRAM_BYTES_MAX).decode().split("\n")

    def received(self) -> list[list[str]]:
        """The lines of every unread message, without waiting."""
        self._socket.settimeout(0)
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(DATAGRAM_BYTES_MAX).decode().split("\n"))
            except BlockingIOError:
                return messages

    def fill_queue(self) -> int:
        """Fill the receive queue; returns the number of queued messages."""
        count = 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            while True:
                try:
                    other.sendto(b"X=1", self._address)
                except BlockingIOError:
                    return count
                count += 1


def service_manager_in(directory: Path) -> FakeServiceManager:
    """A service manager with its socket in this directory."""
    return FakeServiceManager(str(directory / "notify"))
