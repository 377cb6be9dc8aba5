"""The watchdog: when the daemon no longer gets on, the service manager ends it and starts another.

Law: the watchdog is fed for real progress only. A request goes through the bus and is answered, whatever the answer;
the built-in handlers get on with the facts that wait for them, and the store with what was decided. So a blocked event
loop, a built-in handler that never returns and a commit that never ends are not fed. What is the world's fault (a
store that refuses to write) or a plugin's is no reason to start anew: it would be the same then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import anyio

from forged.errors import ForgedError
from forged.kernel.bus import DAEMON, Bus
from forged.kernel.messages import Call
from forged.log import SILENT, Log
from forged.status.model import PingDaemon
from forged.systemd.environment import Environment, take, whole_number
from forged.systemd.notify import Notifier
from forged.systemd.progress import Lane, Progress

FEEDS_PER_TIMEOUT = 3
"""One that is late, or lost, does no harm yet."""

Probe = Callable[[], Awaitable[list[str]]]
"""Says what does not get on; never comes back when the bus is dead."""


def feeding_interval_s(environment: Environment, pid: int) -> float | None:
    """How often the service manager wants to be told that this process is alive; None if not at all."""
    given_usec, given_pid = take(environment, "WATCHDOG_USEC"), take(environment, "WATCHDOG_PID")
    timeout_usec, addressee = whole_number("WATCHDOG_USEC", given_usec), whole_number("WATCHDOG_PID", given_pid)
    if not timeout_usec or addressee not in (None, pid):
        return None
    return timeout_usec / 1e6 / FEEDS_PER_TIMEOUT


class BusProbe:
    """Looks whether the bus gets on, one look per interval."""

    def __init__(self, bus: Bus, interval_s: float) -> None:
        self._bus = bus
        self._progress = Progress()
        # Answered in time it shows that requests are done, even where a plugin wraps this one and hangs.
        self._call = Call(DAEMON, "watchdog", timeout_s=interval_s / 2)

    async def __call__(self) -> list[str]:
        stuck = self._progress.stuck(_lanes(self._bus))
        try:
            await self._bus.ask(PingDaemon(), self._call)
        except ForgedError:
            # A refusal is an answer.
            return stuck
        return stuck


async def feed(notifier: Notifier, interval_s: float, probe: Probe, log: Log = SILENT) -> None:
    """Feed the watchdog for ever, as often as the probe is content; the log hears each time why it is not."""
    while True:
        started = anyio.current_time()
        stuck = ["the bus"]
        with anyio.move_on_after(interval_s):
            stuck = await probe()
        if stuck:
            log.warning("watchdog not fed", stuck=stuck)
        else:
            notifier.watchdog()
        await anyio.sleep_until(started + interval_s)


def _lanes(bus: Bus) -> Iterator[Lane]:
    ledger = bus.ledger
    writable = ledger.writable_now
    yield Lane("the store", writable and ledger.durable < ledger.revision, ledger.durable)
    for mailbox in bus.mailboxes.values():
        terms = mailbox.subscription
        # A durable handler waits for a store that does not take writes, and goes on when it does.
        if terms.lossless and (writable or not terms.durable):
            yield Lane(f"handler {mailbox.name}", not mailbox.idle, mailbox.statistics.handled)
