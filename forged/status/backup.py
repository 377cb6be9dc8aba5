"""The backup service: copies the store and serves the copy over a side connection.

Invariants:
- A backup is consistent; commits continue while it is made.
- The copy is an unlinked file that exists until its ticket is used or expires. A copy that was left by a killed daemon
  is removed at the next start.
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
    """Makes backups, one at a time."""

    def __init__(self, bus: Bus, tickets: TicketRegistry, copy: Copy | None, directory: Path) -> None:
        self._tickets = tickets
        self._copy = copy
        self._path = directory / NAME
        self._busy = False
        bus.serve(BackUp, self._back_up, owner=OWNER)

    def clear(self) -> None:
        """Remove the copies that a killed daemon left. The data directory must be locked."""
        if self._copy is None:
            return
        for left in self._path.parent.glob(f"{NAME}*"):
            # If the directory is not writable, the store reports it; an old copy must not prevent the start.
            with suppress(OSError):
                left.unlink()

    async def _back_up(self, request: BackUp, call: Call) -> Ticket:
        if self._copy is None:
            raise RequestRefused("backup_impossible", "this daemon's store is not a file", "use a data directory")
        if self._busy:
            raise Unavailable("backup_busy", "another backup is running", "retry when it is finished")
        self._busy = True
        try:
            await self._copy(self._path)
            return self._tickets.issue(self._transfer(), call.principal)
        finally:
            self._busy = False

    def _transfer(self) -> BulkTransfer:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        # Unlinked at once: the open file can still be read, and nothing is left after a crash.
        self._path.unlink()
        return file_sender(fd, os.fstat(fd).st_size)
