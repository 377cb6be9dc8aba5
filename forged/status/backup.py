"""Backups, on the bus.

Law: a backup is made while commits go on, and is consistent. It is a file of its own for as long as its ticket is good,
and is gone when it was fetched, when nobody came, and, from the next start on, when the daemon died in between.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from forged.errors import RequestRefused, Unavailable
from forged.kernel.bus import Bus
from forged.kernel.messages import Call, Ticket
from forged.net.bulk.side_connection import BulkTransfer, file_sender
from forged.net.tickets import TicketRegistry
from forged.status.model import BackUp

OWNER = "backup"
NAME = "backup.tmp"

Copy = Callable[[Path], Awaitable[None]]


class BackupService:
    """Copies the store and offers the copy."""

    def __init__(self, bus: Bus, tickets: TicketRegistry, copy: Copy | None, directory: Path) -> None:
        self._tickets = tickets
        self._copy = copy
        self._path = directory / NAME
        self._busy = False
        bus.serve(BackUp, self._back_up, owner=OWNER)

    def clear(self) -> None:
        """Remove what a daemon left that died over a backup. Nobody else may use the directory."""
        if self._copy is None:
            return
        for left in self._path.parent.glob(f"{NAME}*"):
            # Where nothing can be removed, the store has its own word for that; an old copy keeps nobody from starting.
            with suppress(OSError):
                left.unlink()

    async def _back_up(self, request: BackUp, call: Call) -> Ticket:
        if self._copy is None:
            raise RequestRefused("backup_impossible", "this daemon's store is not a file", "run it on a data directory")
        if self._busy:
            raise Unavailable("backup_busy", "another backup is being made", "try again when it is done")
        self._busy = True
        try:
            await self._copy(self._path)
            return self._tickets.issue(self._transfer())
        finally:
            self._busy = False

    def _transfer(self) -> BulkTransfer:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        # The name goes at once: what is open can still be read, and whatever happens next leaves nothing behind.
        self._path.unlink()
        return file_sender(fd, os.fstat(fd).st_size)
