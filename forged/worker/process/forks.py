"""Sockets that forked children must not keep.

Law: the connections of a worker end when its process ends. A child that was forked from it, to load data say, has
copies of its sockets and would hold them open; so in the child they are closed before anything else is done, without a
word to the other end, and whoever uses the worker there is told so.

A number that was closed would be given to the next file, and an object that still thinks the number its own would
close that one. So what is closed is replaced by nothing, under the same number.

Children that C code forks on its own, and sockets that another thread is opening at that very moment, escape. The
worker's pulse does not go by its sockets.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

from forged.errors import RequestRefused

_held: dict[ForkGuard, None] = {}


class ForkGuard:
    """Closes in forked children what belongs to this process alone: the sockets that `descriptors` names then."""

    def __init__(self, descriptors: Callable[[], Iterable[int]]) -> None:
        self.forked = False
        """Whether this is a child of the process to which the sockets belong."""
        self._descriptors = descriptors
        self._owner = os.getpid()
        _held[self] = None

    def check(self) -> None:
        """Raise, in a forked child."""
        if self.forked:
            raise RequestRefused(
                "worker_forked",
                f"this worker belongs to process {self._owner}, from which process {os.getpid()} was forked",
                "use it in the process that joined; a child that needs one joins as a worker of its own",
            )

    def close(self) -> None:
        """Nothing is left to be closed; no error if that is known already."""
        _held.pop(self, None)

    def leave_behind(self, nothing: int | None) -> None:
        """In the child: let go of everything. `nothing` is a descriptor that takes the place of each."""
        self.forked = True
        for descriptor in self._descriptors():
            # What somebody else has closed meanwhile is as good as closed.
            with contextlib.suppress(OSError):
                os.close(descriptor) if nothing is None else _replace(descriptor, nothing)


def _replace(descriptor: int, nothing: int) -> None:
    os.fstat(descriptor)
    os.dup2(nothing, descriptor, inheritable=False)


def _leave_all_behind() -> None:
    """Called in every forked child, by its only thread, before it goes on."""
    if not _held:
        return
    guards = list(_held)
    _held.clear()
    nothing: int | None = None
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for guard in guards:
        # Whatever is wrong with one, the others' sockets have to be closed all the same.
        with contextlib.suppress(Exception):
            guard.leave_behind(nothing)
    if nothing is not None:
        os.close(nothing)


os.register_at_fork(after_in_child=_leave_all_behind)
