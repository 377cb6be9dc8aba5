"""A service manager, as far as it listens to what services tell it."""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from forged.systemd.notify import Notifier

HEARS_WITHIN_S = 30.0
DATAGRAM_BYTES_MAX = 4096


class Manager:
    """Its notification socket, at a path or, where that begins with @, an abstract one."""

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

    def hear(self) -> list[str]:
        """Wait for a message; returns its lines."""
        self._socket.settimeout(HEARS_WITHIN_S)
        return self._socket.recv(DATAGRAM_BYTES_MAX).decode().split("\n")

    def heard(self) -> list[list[str]]:
        """The lines of every message that has come and was not heard yet."""
        self._socket.settimeout(0)
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(DATAGRAM_BYTES_MAX).decode().split("\n"))
            except BlockingIOError:
                return messages

    def be_busy(self) -> int:
        """Let no more messages in until some were heard; returns how many are waiting."""
        count = 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            while True:
                try:
                    other.sendto(b"X=1", self._address)
                except BlockingIOError:
                    return count
                count += 1


def at(directory: Path) -> Manager:
    """A service manager with its socket in this directory."""
    return Manager(str(directory / "notify"))
