"""Closes a worker's sockets in forked children.

Invariants:
- The connections of a worker end when its process ends. A forked child, a data loader for example, has copies of the
  sockets and would hold them open; so they are closed in the child before anything else happens there, without a
  message to the peer. The worker raises an error when it is used in the child.
- A closed descriptor is replaced by `/dev/null`: the next file would otherwise get its number, and an object that still
  owns the number would close that file.

Not covered: children that C code forks by itself, and sockets that another thread opens during the fork. The pulse does
not depend on the worker's sockets.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

from forged.errors import RequestRefused

_held: dict[ForkGuard, None] = {}


class ForkGuard:
    """Closes, in forked children, the sockets that `descriptors` returns there."""

    def __init__(self, descriptors: Callable[[], Iterable[int]]) -> None:
        self.forked = False
        """Whether this process is a child of the one that owns the sockets."""
        self._descriptors = descriptors
        self._owner = os.getpid()
        _held[self] = None

    def check(self) -> None:
        """Raise in a forked child."""
        if self.forked:
            raise RequestRefused(
                "worker_forked",
                f"this worker belongs to process {self._owner}, from which process {os.getpid()} was forked",
                "use it in the process that joined; a child that needs one joins as a worker of its own",
            )

    def close(self) -> None:
        """Close nothing in later children. Idempotent."""
        _held.pop(self, None)

    def leave_behind(self, nothing: int | None) -> None:
        """In the child: close the sockets. `nothing` is a descriptor of `/dev/null` that replaces each."""
        self.forked = True
        for descriptor in self._descriptors():
            # The descriptor may be closed already.
            with contextlib.suppress(OSError):
                os.close(descriptor) if nothing is None else _replace(descriptor, nothing)


def _replace(descriptor: int, nothing: int) -> None:
    os.fstat(descriptor)
    os.dup2(nothing, descriptor, inheritable=False)


def _leave_all_behind() -> None:
    """Called in every forked child, in its only thread, before `fork` returns."""
    if not _held:
        return
    guards = list(_held)
    _held.clear()
    nothing: int | None = None
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for guard in guards:
        # An error with one guard must not leave another guard's sockets open.
        with contextlib.suppress(Exception):
            guard.leave_behind(nothing)
    if nothing is not None:
        os.close(nothing)


os.register_at_fork(after_in_child=_leave_all_behind)
