"""Feeds systemd's watchdog while the daemon makes progress.

Invariants:
- The watchdog is fed only if the bus answers a request, built-in handlers process their queued facts, and the store
  commits decisions. A blocked event loop, a handler that never returns or a commit that never ends leads to a restart.
- A store that refuses writes and a failing plugin do not, because a restart would not help.
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
from forged.systemd.progress import Progress, WorkQueue

FEEDS_PER_TIMEOUT = 3
"""More than one, so that a late or lost message does no harm."""

Probe = Callable[[], Awaitable[list[str]]]
"""Returns the names of stuck queues; does not return if the bus is stuck."""


def watchdog_interval_s(environment: Environment, pid: int) -> float | None:
    """The interval at which the service manager expects watchdog messages; None without a watchdog."""
    given_usec, given_pid = take(environment, "WATCHDOG_USEC"), take(environment, "WATCHDOG_PID")
    timeout_usec, addressed_pid = whole_number("WATCHDOG_USEC", given_usec), whole_number("WATCHDOG_PID", given_pid)
    if not timeout_usec or addressed_pid not in (None, pid):
        return None
    return timeout_usec / 1e6 / FEEDS_PER_TIMEOUT


class BusProbe:
    """Checks the progress of the bus, once per interval."""

    def __init__(self, bus: Bus, interval_s: float) -> None:
        self._bus = bus
        self._progress = Progress()
        # The timeout makes the bus answer even if a plugin that wraps the request hangs.
        self._call = Call(DAEMON, "watchdog", timeout_s=interval_s / 2)

    async def __call__(self) -> list[str]:
        stuck = self._progress.stuck(_work_queues(self._bus))
        try:
            await self._bus.ask(PingDaemon(), self._call)
        except ForgedError:
            # An error is an answer, too.
            return stuck
        return stuck


async def feed_watchdog(notifier: Notifier, interval_s: float, probe: Probe, log: Log = SILENT) -> None:
    """Feed the watchdog when the probe finds nothing stuck, else log what is stuck; until cancelled."""
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


def _work_queues(bus: Bus) -> Iterator[WorkQueue]:
    ledger = bus.ledger
    writable = ledger.writable_now
    yield WorkQueue("the store", writable and ledger.durable < ledger.revision, ledger.durable)
    for mailbox in bus.mailboxes.values():
        terms = mailbox.subscription
        # A durable handler waits while the store accepts no writes.
        if terms.lossless and (writable or not terms.durable):
            yield WorkQueue(f"handler {mailbox.name}", not mailbox.idle, mailbox.statistics.handled)
