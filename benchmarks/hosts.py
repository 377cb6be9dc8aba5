"""Hosts on one machine: network namespaces at a switch of their own.

Law: what is unplugged says nothing and hears nothing, as a host does that has lost its power: no packet tells anybody.
All of it is gone at the end of the block, the processes too, and the machine's own network is never touched.
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
    """Why this machine has no such hosts; empty where it has."""
    if shutil.which("ip") is None:
        return "there is no `ip`"
    try:
        with Hosts("a"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip() or error}"


class Hosts:
    """Some hosts, each with its name, that reach each other through one switch."""

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
        """Where the others reach it."""
        return f"{NETWORK}.{1 + self.names.index(name)}"

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Run a program there; it is killed at the end."""
        inside = ["ip", "netns", "exec", self._namespace(name), *command]
        process = subprocess.Popen(inside, text=True, env={**os.environ, **(environment or {})}, **options)
        self._open.callback(process.communicate)
        self._open.callback(process.kill)
        return process

    def unplug(self, name: str) -> None:
        """From now on nobody hears of it."""
        self._set_port(name, "down")

    def plug_in(self, name: str) -> None:
        """It is back."""
        self._set_port(name, "up")

    def part(self, *names: str) -> None:
        """None of these reaches another of these; everybody else reaches all."""
        self._set_isolated(names, "on")

    def bring_together(self, *names: str) -> None:
        """They reach each other again."""
        self._set_isolated(names, "off")

    def silence(self, speaker: str, listener: str) -> None:
        """What the one says does not reach the other any more; what the other says does reach it."""
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
