"""Which connections may wait a moment, so that many are heard in one go: interrupt moderation, as network cards do it.

Law: a connection that speaks after it was still for a while is resting from then on, until it speaks again within less.
Who rests is heard at once for as long as that wakes the process seldom. Where it comes often, all who rest are heard
together, again and again, and none of them waits longer than from one time to the next; until too few have spoken
in between for that to be worth it. All other connections, and whatever else an event loop waits for, are not delayed.

A thousand workers with a heartbeat each per second would wake the process a thousand times a second, and to wake up,
with cold caches, costs ten times what it costs to hear one of them.
"""

from __future__ import annotations

import socket
from collections import ChainMap, deque
from collections.abc import Callable, Mapping
from selectors import EVENT_READ, BaseSelector, EpollSelector, SelectorKey
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

STILL_S = 0.02
"""Who says nothing for so long may rest."""
WAKES_MAX = 250
WAKES_WITHIN_S = 1.0
"""Those who rest may wake the process so often within such a time. What a few say to each other in a hurry is less."""
HOLD_S = 0.01
"""How long they wait at most when they have woken it more often."""
WORTH = 2
"""So many have to have spoken meanwhile, or they wait no more."""
IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)

Ready = list[tuple[SelectorKey, int]]


class ModeratingSelector(BaseSelector):
    """An epoll set for an event loop, and in it a second one with the connections that rest."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._awake, self._resting = EpollSelector(), EpollSelector()
        self._map = ChainMap[Any, SelectorKey](
            self._awake.get_map(),  # type: ignore[arg-type]
            self._resting.get_map(),  # type: ignore[arg-type]
        )
        self._heard_at: dict[int, float] = {}
        """When those that may rest, as far as is known, were heard last."""
        self._wakes: deque[float] = deque(maxlen=WAKES_MAX)
        """When those that rest woke the process."""
        self._look_at: float | None = None
        """When those that rest are heard again; None while they wake the process."""
        self._resting_fd = self._resting.fileno()
        self._awake.register(self._resting_fd, EVENT_READ)

    def register(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> SelectorKey:
        # Whoever closed a descriptor and left it here is told so by its next owner, as by any other selector.
        self._rouse(fileobj)
        return self._note(self._awake.register(fileobj, events, data))

    def unregister(self, fileobj: FileDescriptorLike) -> SelectorKey:
        key = self._end_rest(fileobj) or self._awake.unregister(fileobj)
        self._heard_at.pop(key.fd, None)
        return key

    def modify(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> SelectorKey:
        self._rouse(fileobj)
        return self._note(self._awake.modify(fileobj, events, data))

    def get_map(self) -> Mapping[FileDescriptorLike, SelectorKey]:
        return self._map

    def close(self) -> None:
        self._awake.close()
        self._resting.close()

    def select(self, timeout: float | None = None) -> Ready:
        if self._look_at is not None:
            left_s = self._look_at - self._now()
            timeout = left_s if timeout is None else min(timeout, left_s)
        ready = self._awake.select(timeout)
        now = self._now()
        if self._look_at is None:
            spoken = self._hear(now) if self._drop_resting(ready) else []
        else:
            spoken = self._hear_together(now) if now >= self._look_at else []
        # Behind that, or those who rest from now on would be found with what they were just heard for.
        self._send_to_rest(ready, now)
        return ready + spoken

    def _drop_resting(self, ready: Ready) -> bool:
        """Whether those that rest are what woke the process, which nobody else has to know."""
        for index, (key, _) in enumerate(ready):
            if key.fd == self._resting_fd:
                del ready[index]
                return True
        return False

    def _hear(self, now: float) -> Ready:
        """Those that rest and have spoken; the others will have to wait where this happens too often."""
        wakes = self._wakes
        wakes.append(now)
        if len(wakes) == WAKES_MAX and now - wakes[0] < WAKES_WITHIN_S:
            self._awake.unregister(self._resting_fd)
            self._look_at = now + HOLD_S
        return self._spoken(now)

    def _hear_together(self, now: float) -> Ready:
        """Those that rest and have spoken since they were heard last."""
        spoken = self._spoken(now)
        if len(spoken) >= WORTH:
            self._look_at = now + HOLD_S
        else:
            self._wakes.clear()
            self._look_at = None
            self._awake.register(self._resting_fd, EVENT_READ)
        return spoken

    def _spoken(self, now: float) -> Ready:
        spoken = self._resting.select(0)
        for key, _ in spoken:
            if now - self._heard_at[key.fd] < STILL_S:
                self._rouse(key.fd)
            self._heard_at[key.fd] = now
        return spoken

    def _send_to_rest(self, ready: Ready, now: float) -> None:
        for key, _ in ready:
            heard_at = self._heard_at.get(key.fd)
            if heard_at is None:
                continue
            self._heard_at[key.fd] = now
            if now - heard_at < STILL_S:
                continue
            if is_ip_connection(key.fd):
                self._awake.unregister(key.fd)
                self._resting.register(key.fd, key.events, key.data)
            else:
                del self._heard_at[key.fd]

    def _rouse(self, fileobj: FileDescriptorLike) -> None:
        if (key := self._end_rest(fileobj)) is not None:
            self._awake.register(key.fd, key.events, key.data)

    def _end_rest(self, fileobj: FileDescriptorLike) -> SelectorKey | None:
        try:
            return self._resting.unregister(fileobj)
        except (KeyError, ValueError):
            # It does not rest, or is closed and not known by its number.
            return None

    def _note(self, key: SelectorKey) -> SelectorKey:
        """Only who waits for nothing but to hear may rest, and only what is known by its number."""
        if key.events == EVENT_READ and isinstance(key.fileobj, int):
            self._heard_at[key.fd] = self._now()
        else:
            self._heard_at.pop(key.fd, None)
        return key


def is_ip_connection(descriptor: int) -> bool:
    """Whether it is a connection over IP; not a socket that listens, or one of this process alone."""
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
