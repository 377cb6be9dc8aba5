"""Keeps the status line that `systemctl status` shows up to date."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from forged.errors import ForgedError
from forged.status.model import Status
from forged.systemd.notify import Notifier

UPDATE_INTERVAL_S = 5.0
RETRY_INTERVAL_S = 0.5
"""The pause before an unsent message is retried."""


def status_line(status: Status) -> str:
    if status.write_error is not None:
        return f"cannot write: {status.write_error}"
    counts = ", ".join((_count(status.jobs, "job"), _count(status.connections, "connection")))
    return f"{counts}, fact {status.last_fact}"


async def read_status_line(read_status: Callable[[], Awaitable[Status]]) -> str:
    """The current status line; the error if the daemon refuses, empty if it does not answer in time."""
    with anyio.move_on_after(UPDATE_INTERVAL_S):
        try:
            return status_line(await read_status())
        except ForgedError as error:
            return f"cannot answer: {error.message}"
    return ""


async def report(notifier: Notifier, read_status: Callable[[], Awaitable[Status]]) -> None:
    """Update the status line and retry unsent messages, until cancelled."""
    while True:
        while notifier.has_unsent:
            await anyio.sleep(RETRY_INTERVAL_S)
            notifier.retry()
        line = await read_status_line(read_status)
        if line:
            notifier.status(line)
        await anyio.sleep(UPDATE_INTERVAL_S)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
