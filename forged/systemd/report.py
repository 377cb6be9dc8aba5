"""The line about the daemon that `systemctl status` shows.

Law: it says what an operator wants to know first, changes only when that does, and is never worth waiting for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from forged.errors import ForgedError
from forged.status.model import Status
from forged.systemd.notify import Notifier

LOOK_INTERVAL_S = 5.0
RETRY_INTERVAL_S = 0.5
"""How soon what the manager must hear, and did not, is tried again."""


def status_line(status: Status) -> str:
    """The daemon in a few words."""
    if status.trouble is not None:
        return f"cannot write: {status.trouble}"
    counts = ", ".join((_count(status.jobs, "job"), _count(status.connections, "connection")))
    return f"{counts}, fact {status.last_fact}"


async def look(read_status: Callable[[], Awaitable[Status]]) -> str:
    """The line as it is now, whatever the daemon answers; empty when it does not in time."""
    with anyio.move_on_after(LOOK_INTERVAL_S):
        try:
            return status_line(await read_status())
        except ForgedError as error:
            return f"cannot answer: {error.message}"
    return ""


async def report(notifier: Notifier, read_status: Callable[[], Awaitable[Status]]) -> None:
    """Keep the line up to date for ever, and see to it that the manager hears what it must."""
    while True:
        while notifier.owes:
            await anyio.sleep(RETRY_INTERVAL_S)
            notifier.retry()
        line = await look(read_status)
        if line:
            notifier.status(line)
        await anyio.sleep(LOOK_INTERVAL_S)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
