"""Interrupt moderation for the daemon's event loop: read many mostly idle connections in one wake-up.

A thousand workers with one heartbeat per second would wake the process a thousand times per second, and a wake-up with
cold caches costs several times as much as reading one heartbeat (docs/decisions has the figures).

Invariants:
- A connection that receives data after `IDLE_MIN_S` without data becomes idle, until data comes at shorter intervals.
- Idle connections are read at once while they cause fewer than `WAKES_MAX` wake-ups in `WAKES_WITHIN_S`. Above that
  they are polled together every `POLL_INTERVAL_S`, until a poll finds fewer than `POLL_MIN` of them readable.
- All other connections, descriptors and timers are never delayed.
"""

from __future__ import annotations

import socket
from collections import ChainMap, deque
from collections.abc import Callable, Mapping
from selectors import EVENT_READ, BaseSelector, EpollSelector, SelectorKey
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

IDLE_MIN_S = 0.02
"""A connection without data for this long may become idle."""
WAKES_MAX = 250
WAKES_WITHIN_S = 1.0
"""Idle connections may wake the process this often within `WAKES_WITHIN_S` before they are polled."""
POLL_INTERVAL_S = 0.01
"""The maximum delay of an idle connection while polling."""
POLL_MIN = 2
"""Polling ends when fewer idle connections than this are readable."""
IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)

Ready = list[tuple[SelectorKey, int]]


class ModeratingSelector(BaseSelector):
    """An epoll set that contains a second epoll set with the idle connections."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._active, self._idle = EpollSelector(), EpollSelector()
        self._map = ChainMap[Any, SelectorKey](
            self._active.get_map(),  # type: ignore[arg-type]
            self._idle.get_map(),  # type: ignore[arg-type]
        )
        self._read_at: dict[int, float] = {}
        """The last read of each connection that may become idle."""
        self._wakes: deque[float] = deque(maxlen=WAKES_MAX)
        """The latest wake-ups by idle connections."""
        self._poll_at: float | None = None
        """The time of the next poll; None while idle connections wake the process."""
        self._idle_fd = self._idle.fileno()
        self._active.register(self._idle_fd, EVENT_READ)

    def register(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> SelectorKey:
        # A descriptor that was closed without unregistering is detected by its next owner, as in other selectors.
        self._activate(fileobj)
        return self._track(self._active.register(fileobj, events, data))

    def unregister(self, fileobj: FileDescriptorLike) -> SelectorKey:
        key = self._remove_idle(fileobj) or self._active.unregister(fileobj)
        self._read_at.pop(key.fd, None)
        return key

    def modify(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> SelectorKey:
        self._activate(fileobj)
        return self._track(self._active.modify(fileobj, events, data))

    def get_map(self) -> Mapping[FileDescriptorLike, SelectorKey]:
        return self._map

    def close(self) -> None:
        self._active.close()
        self._idle.close()

    def select(self, timeout: float | None = None) -> Ready:
        if self._poll_at is not None:
            left_s = self._poll_at - self._now()
            timeout = left_s if timeout is None else min(timeout, left_s)
        ready = self._active.select(timeout)
        now = self._now()
        if self._poll_at is None:
            readable = self._wake(now) if self._remove_idle_set(ready) else []
        else:
            readable = self._poll(now) if now >= self._poll_at else []
        # After reading the idle set, or newly idle connections would be reported twice.
        self._move_to_idle(ready, now)
        return ready + readable

    def _remove_idle_set(self, ready: Ready) -> bool:
        """Remove the idle set from `ready`; returns whether it was readable."""
        for index, (key, _) in enumerate(ready):
            if key.fd == self._idle_fd:
                del ready[index]
                return True
        return False

    def _wake(self, now: float) -> Ready:
        """The readable idle connections; starts polling after too many wake-ups."""
        wakes = self._wakes
        wakes.append(now)
        if len(wakes) == WAKES_MAX and now - wakes[0] < WAKES_WITHIN_S:
            self._active.unregister(self._idle_fd)
            self._poll_at = now + POLL_INTERVAL_S
        return self._readable(now)

    def _poll(self, now: float) -> Ready:
        """The readable idle connections; ends polling if they are few."""
        readable = self._readable(now)
        if len(readable) >= POLL_MIN:
            self._poll_at = now + POLL_INTERVAL_S
        else:
            self._wakes.clear()
            self._poll_at = None
            self._active.register(self._idle_fd, EVENT_READ)
        return readable

    def _readable(self, now: float) -> Ready:
        readable = self._idle.select(0)
        for key, _ in readable:
            if now - self._read_at[key.fd] < IDLE_MIN_S:
                self._activate(key.fd)
            self._read_at[key.fd] = now
        return readable

    def _move_to_idle(self, ready: Ready, now: float) -> None:
        for key, _ in ready:
            read_at = self._read_at.get(key.fd)
            if read_at is None:
                continue
            self._read_at[key.fd] = now
            if now - read_at < IDLE_MIN_S:
                continue
            if is_ip_connection(key.fd):
                self._active.unregister(key.fd)
                self._idle.register(key.fd, key.events, key.data)
            else:
                del self._read_at[key.fd]

    def _activate(self, fileobj: FileDescriptorLike) -> None:
        if (key := self._remove_idle(fileobj)) is not None:
            self._active.register(key.fd, key.events, key.data)

    def _remove_idle(self, fileobj: FileDescriptorLike) -> SelectorKey | None:
        try:
            return self._idle.unregister(fileobj)
        except (KeyError, ValueError):
            # Not idle, or closed.
            return None

    def _track(self, key: SelectorKey) -> SelectorKey:
        """Only descriptors that are registered for reading alone, by number, may become idle."""
        if key.events == EVENT_READ and isinstance(key.fileobj, int):
            self._read_at[key.fd] = self._now()
        else:
            self._read_at.pop(key.fd, None)
        return key


def is_ip_connection(descriptor: int) -> bool:
    """Whether the descriptor is a connected TCP socket."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        sock.getpeername()
    except OSError:
        return False
    else:
        return sock.family in IP_FAMILIES and sock.type == socket.SOCK_STREAM
    finally:
        sock.detach()
