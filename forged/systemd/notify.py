"""Notifies the service manager, as described in `man sd_notify`.

Invariants:
- Sending never blocks and never raises.
- READY, RELOADING and STOPPING are retried until sent; only the latest of them is kept. Status lines are not retried.
- After STOPPING only watchdog messages are sent. Without a service manager nothing is sent.
"""

from __future__ import annotations

import socket
from typing import Self

from forged.systemd.environment import Environment, invalid_variable, take

STATUS_CHARS_MAX = 500
"""The manager reads datagrams up to a few thousand bytes."""


class Notifier:
    """Sends messages to a service manager; without an address it sends nothing."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._unsent: str | None = None
        self._shown = ""
        """The last status that was sent."""
        self._stopping = False

    @classmethod
    def from_environment(cls, environment: Environment) -> Self:
        """Notify the socket in `NOTIFY_SOCKET`; removes the variable."""
        given = take(environment, "NOTIFY_SOCKET")
        if not given:
            return cls(None)
        if given[0] not in "/@" or len(given) == 1:
            raise invalid_variable("NOTIFY_SOCKET", given, "an absolute path or @ and the name of an abstract socket")
        return cls(f"\0{given[1:]}" if given[0] == "@" else given)

    @property
    def active(self) -> bool:
        """Whether there is a service manager."""
        return self._address is not None

    @property
    def has_unsent(self) -> bool:
        """Whether a READY, RELOADING or STOPPING message has not been sent yet."""
        return self._unsent is not None

    def ready(self, status: str) -> None:
        """Report that the daemon serves: started, or reloaded."""
        self._send_reliably("READY=1", status)

    def reloading(self, monotonic_usec: int) -> None:
        """Report a reload that began at this time of CLOCK_MONOTONIC; `ready` ends it."""
        self._send_reliably(f"RELOADING=1\nMONOTONIC_USEC={monotonic_usec}", self._shown)

    def stopping(self, status: str, *, within_s: float | None = None) -> None:
        """Report that the daemon stops and ask for `within_s`, even if the unit allows less."""
        extension = "" if within_s is None else f"\nEXTEND_TIMEOUT_USEC={round(within_s * 1e6)}"
        self._send_reliably(f"STOPPING=1{extension}", status)
        self._stopping = True

    def status(self, text: str) -> None:
        """Show a status text, unless it is shown already."""
        self.retry()
        line = _line(text)
        if not self._stopping and line != self._shown and self._send(f"STATUS={line}"):
            self._shown = line

    def watchdog(self) -> None:
        self.retry()
        self._send("WATCHDOG=1")

    def retry(self) -> None:
        """Send the kept message, if there is one."""
        if self._unsent is not None and self._send(self._unsent):
            self._unsent = None

    def _send_reliably(self, message: str, status: str) -> None:
        if self.active and not self._stopping:
            self._shown = _line(status)
            self._unsent = f"{message}\nSTATUS={self._shown}"
            self.retry()

    def _send(self, message: str) -> bool:
        if self._address is None:
            return False
        try:
            # A new socket each time, because a restarted manager binds another socket at the same path.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(message.encode(), self._address)
        except OSError:
            return False
        return True


def _line(text: str) -> str:
    """The text as one line of valid UTF-8, limited in length."""
    return " ".join(text.split())[:STATUS_CHARS_MAX].encode(errors="replace").decode()
