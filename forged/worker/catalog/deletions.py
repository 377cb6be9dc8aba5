"""Deletes the files of collected checkpoints that only this worker may delete, and reports that they are gone.

Invariants:
- Only files that have the save id which the daemon has named are deleted.
- A slow storage delays neither the reports nor the end of the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from anyio import to_thread
from anyio.abc import TaskGroup

from forged.catalog.messages import CollectedFiles, ConfirmDeleted
from forged.errors import ForgedError
from forged.log import Log
from forged.worker.catalog.reports import CheckpointReports, Report
from forged.worker.registration import Registration

if TYPE_CHECKING:
    # Loaded by scripts that use checkpoints.
    from forged.checkpoint.ports import Storage


class Deletions:
    """The deletions of one worker, in the background."""

    def __init__(self, reports: CheckpointReports, log: Log) -> None:
        self._reports = reports
        self._log = log
        self._running: set[str] = set()
        """The ids of the checkpoints that are being deleted."""

    def start(self, tasks: TaskGroup, storage: Storage, collected: Sequence[CollectedFiles]) -> None:
        """Delete collected checkpoints of a storage, except those that are being deleted already."""
        files = [one for one in collected if one.checkpoint_id not in self._running]
        if files:
            self._running.update(one.checkpoint_id for one in files)
            tasks.start_soon(self._delete, storage, files)

    async def _delete(self, storage: Storage, files: Sequence[CollectedFiles]) -> None:
        try:
            gone = await to_thread.run_sync(partial(self._delete_in_thread, storage, files), abandon_on_cancel=True)
        finally:
            self._running.difference_update(one.checkpoint_id for one in files)
        if gone:
            self._reports.add(Report("deletion", partial(self._send_deleted, gone)))

    def _delete_in_thread(self, storage: Storage, files: Sequence[CollectedFiles]) -> list[str]:
        """Returns the ids of the checkpoints that have no files any more."""
        from forged.checkpoint.storage.listing import delete_save

        gone = []
        for one in files:
            prefix = one.storage_path.removeprefix(f"{storage.url}/")
            try:
                if prefix != one.storage_path and delete_save(storage, prefix, one.save_id):
                    gone.append(one.checkpoint_id)
                    self._log.info("old checkpoint deleted", prefix=prefix)
            except ForgedError as error:
                self._log.warning("could not delete an old checkpoint", prefix=prefix, reason=str(error))
        return gone

    async def _send_deleted(self, checkpoints: list[str], registration: Registration) -> None:
        job, worker, incarnation = registration.job, registration.worker.id, registration.incarnation
        await registration.send(ConfirmDeleted(job, worker, incarnation, checkpoints))
