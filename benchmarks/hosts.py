"""Hosts on one machine: network namespaces connected by a bridge.

Invariants:
- An unplugged host sends and receives nothing, like a host without power.
- At the end of the block all namespaces and processes are gone. The machine's own network is never changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from types import TracebackType
from typing import Any, Self

NETWORK = "10.77.0"
SWITCH = "switch"


@cache
def why_not() -> str:
    """Why this machine cannot run such hosts; empty if it can."""
    if shutil.which("ip") is None:
        return "the `ip` command is not installed"
    try:
        with Hosts("a"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip() or error}"


class Hosts:
    """Named hosts that reach each other through one switch."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._mark = f"forged-{os.getpid()}-{os.urandom(3).hex()}"
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._add(stack, SWITCH)
            _ip("-n", self._namespace(SWITCH), "link", "add", "bridge", "up", "type", "bridge")
            for name in self.names:
                self._add(stack, name)
                self._connect(name)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def address(self, name: str) -> str:
        """The host's address."""
        return f"{NETWORK}.{1 + self.names.index(name)}"

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Run a program on a host; it is killed at the end of the block."""
        inside = ["ip", "netns", "exec", self._namespace(name), *command]
        process = subprocess.Popen(inside, text=True, env={**os.environ, **(environment or {})}, **options)
        self._open.callback(process.communicate)
        self._open.callback(process.kill)
        return process

    def unplug(self, name: str) -> None:
        """Take the host's link down."""
        self._set_port(name, "down")

    def plug_in(self, name: str) -> None:
        """Bring the host's link up again."""
        self._set_port(name, "up")

    def part(self, *names: str) -> None:
        """Cut the connections among these hosts; all other hosts still reach them."""
        self._set_isolated(names, "on")

    def bring_together(self, *names: str) -> None:
        """Restore the connections among these hosts."""
        self._set_isolated(names, "off")

    def silence(self, speaker: str, listener: str) -> None:
        """Drop what `speaker` sends to `listener`; the other direction still works."""
        _ip("-n", self._namespace(speaker), "route", "add", "blackhole", f"{self.address(listener)}/32")

    def _add(self, stack: ExitStack, name: str) -> None:
        _ip("netns", "add", self._namespace(name))
        stack.callback(_ip, "netns", "del", self._namespace(name))

    def _connect(self, name: str) -> None:
        inside, switch = self._namespace(name), self._namespace(SWITCH)
        peer = ("peer", "name", self._port(name), "netns", switch)
        _ip("-n", inside, "link", "add", "eth0", "type", "veth", *peer)
        _ip("-n", inside, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", inside, "link", "set", device, "up")
        _ip("-n", switch, "link", "set", self._port(name), "master", "bridge", "up")

    def _set_port(self, name: str, state: str) -> None:
        _ip("-n", self._namespace(SWITCH), "link", "set", self._port(name), state)

    def _set_isolated(self, names: Sequence[str], state: str) -> None:
        for name in names:
            port = ("dev", self._port(name), "type", "bridge_slave", "isolated", state)
            _ip("-n", self._namespace(SWITCH), "link", "set", *port)

    def _namespace(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def _port(self, name: str) -> str:
        return f"port{self.names.index(name)}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
