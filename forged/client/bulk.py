"""Client methods that transfer bulk bytes over side connections.

Invariants:
- Bytes are read from and written to the caller's open files and buffers.
- A file created here exists completely or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path

import anyio

from forged.client.methods import DaemonMethods
from forged.file_sync import sync_directory
from forged.kernel.messages import Ticket
from forged.net.bulk import side_connection
from forged.status.model import BackUp

BACKUP_TIMEOUT_S = 3600.0


class BulkMethods(DaemonMethods):
    """Methods that use tickets; a subclass opens the side connections."""

    async def fetch_file(self, ticket: Ticket, fd: int, *, offset: int = 0) -> None:
        """Receive the bytes of a ticket into an open file, starting at `offset`."""
        await self._use(ticket, side_connection.file_receiver(fd, ticket.size), offset)

    async def fetch_bytes(self, ticket: Ticket) -> bytearray:
        """Receive the bytes of a ticket into memory."""
        data = bytearray(ticket.size)
        await self._use(ticket, side_connection.buffer_receiver(memoryview(data)))
        return data

    async def fetch_descriptors(self, ticket: Ticket) -> list[int]:
        """Receive file descriptors over a Unix socket; the caller closes them."""
        taken: list[int] = []
        await self._use(ticket, side_connection.descriptor_receiver(ticket.size, taken))
        return taken

    async def deliver_file(self, ticket: Ticket, fd: int, *, offset: int = 0) -> None:
        """Send the bytes that a ticket requests from an open file, starting at `offset`."""
        await self._use(ticket, side_connection.file_sender(fd, ticket.size), offset)

    async def deliver_bytes(self, ticket: Ticket, view: memoryview) -> None:
        """Send the bytes that a ticket requests from memory."""
        await self._use(ticket, side_connection.buffer_sender(view))

    async def backup(self, path: str | os.PathLike[str]) -> int:
        """Fetch a consistent copy of the daemon's database; returns its size in bytes.

        The file exists completely or not at all.
        """
        ticket = await self.request(BackUp(), timeout_s=BACKUP_TIMEOUT_S)
        target = Path(path)
        unfinished = target.with_name(f"{target.name}.part")
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            await self.fetch_file(ticket, fd)
            await anyio.to_thread.run_sync(os.fsync, fd)
        except BaseException:
            unfinished.unlink()
            raise
        finally:
            os.close(fd)
        unfinished.replace(target)
        await anyio.to_thread.run_sync(sync_directory, target.parent)
        return ticket.size

    async def _use(self, ticket: Ticket, offer: side_connection.BulkTransfer, offset: int = 0) -> None:
        """Open a side connection with the ticket and transfer its bytes."""
        raise NotImplementedError
