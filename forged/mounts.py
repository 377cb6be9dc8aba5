"""Which mounted file system a path lies in, by the kernel's list: no file system is asked, because one may hang."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
KNOWN_S = 10.0
"""How long the list is taken for the present one."""


class Mounts:
    """The mount points of this host."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._points: list[str] = []
        self._known_until = -inf

    def of(self, path: str) -> str:
        """The mount point that an absolute path lies in."""
        now = self._monotonic()
        if now >= self._known_until:
            self._points, self._known_until = _mount_points(), now + KNOWN_S
        return mount_of(path, self._points)


def mount_of(path: str, mounts: Iterable[str]) -> str:
    """The longest of the mount points that an absolute path lies in."""
    return max((one for one in mounts if path.startswith(f"{one.rstrip('/')}/")), key=len, default="/")


def _mount_points() -> list[str]:
    with suppress(OSError):
        lines = MOUNTINFO.read_text(errors="surrogateescape").splitlines()
        return [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ", 5)[4]) for line in lines]
    return []
