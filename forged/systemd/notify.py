"""Telling the service manager how the daemon is, as `man sd_notify` says.

Law: telling never waits and never fails. What the manager must hear in the end (the daemon is ready, reloads, stops) is
kept until it got through, the latest of it, because it says where the daemon stands now. A lost status line is no harm:
another one follows. A daemon that stops is alive, and has nothing else to say. Without a manager nothing is told.
"""

from __future__ import annotations

import socket
from typing import Self

from forged.systemd.environment import Environment, nonsense, take

STATUS_CHARS_MAX = 500
"""The manager reads datagrams up to a few thousand bytes."""


class Notifier:
    """The way to the service manager at an address; None is nobody."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._owed: str | None = None
        self._shown = ""
        """The status that the manager has heard last."""
        self._stopping = False

    @classmethod
    def from_environment(cls, environment: Environment) -> Self:
        """The manager that `NOTIFY_SOCKET` names; the variable is gone then."""
        given = take(environment, "NOTIFY_SOCKET")
        if not given:
            return cls(None)
        if given[0] not in "/@" or len(given) == 1:
            raise nonsense("NOTIFY_SOCKET", given, "an absolute path, nor @ and the name of an abstract socket")
        return cls(f"\0{given[1:]}" if given[0] == "@" else given)

    @property
    def active(self) -> bool:
        """Whether there is a manager to tell."""
        return self._address is not None

    @property
    def owes(self) -> bool:
        """Whether something that the manager must hear has not got through."""
        return self._owed is not None

    def ready(self, status: str) -> None:
        """The daemon serves, for the first time or again after reloading."""
        self._owe("READY=1", status)

    def reloading(self, monotonic_usec: int) -> None:
        """The daemon reads its settings anew since this time on CLOCK_MONOTONIC; `ready` says when it is done."""
        self._owe(f"RELOADING=1\nMONOTONIC_USEC={monotonic_usec}", self._shown)

    def stopping(self, status: str, *, within_s: float | None = None) -> None:
        """The daemon stops; the manager gives it `within_s` for that, also where its unit says less."""
        extension = "" if within_s is None else f"\nEXTEND_TIMEOUT_USEC={round(within_s * 1e6)}"
        self._owe(f"STOPPING=1{extension}", status)
        self._stopping = True

    def status(self, text: str) -> None:
        """What to show to people, unless it is shown already."""
        self.retry()
        line = _line(text)
        if not self._stopping and line != self._shown and self._send(f"STATUS={line}"):
            self._shown = line

    def watchdog(self) -> None:
        """The daemon is alive."""
        self.retry()
        self._send("WATCHDOG=1")

    def retry(self) -> None:
        """Try once more what is owed."""
        if self._owed is not None and self._send(self._owed):
            self._owed = None

    def _owe(self, message: str, status: str) -> None:
        if self.active and not self._stopping:
            self._shown = _line(status)
            self._owed = f"{message}\nSTATUS={self._shown}"
            self.retry()

    def _send(self, message: str) -> bool:
        if self._address is None:
            return False
        try:
            # A fresh one each time: there are few messages, and a restarted manager has another socket at the place.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(message.encode(), self._address)
        except OSError:
            return False
        return True


def _line(text: str) -> str:
    """One line of valid UTF-8, of bearable length."""
    return " ".join(text.split())[:STATUS_CHARS_MAX].encode(errors="replace").decode()
