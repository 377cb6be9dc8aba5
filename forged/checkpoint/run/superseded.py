"""Deletes the checkpoints of a run that newer ones supersede.

Invariants:
- A checkpoint is deleted only when newer ones that can be restored are committed; never one that is being read. One
  that the job's catalogue knows is left to the daemon.
- A checkpoint that cannot be deleted fails no save.
"""

from __future__ import annotations

from functools import partial

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.manifest import SUFFIX
from forged.checkpoint.ports import CancelToken, CheckpointCatalog, Storage, bounded, is_held
from forged.checkpoint.run import retention
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.ancestry import AncestryCache, users_among
from forged.checkpoint.thread_calls import run_in_thread
from forged.checkpoint.verification.validator import CheckpointValidator
from forged.log import Log


class SupersededCheckpoints:
    """The checkpoints of one run in one folder, as far as they are to be deleted."""

    def __init__(self, storage: Storage, log: Log) -> None:
        self._storage = storage
        self._log = log
        self._ancestries = AncestryCache()
        self.restorable: set[str] = set()
        """Checkpoints that were committed, loaded or checked here."""
        self.damaged: set[str] = set()

    async def delete(self, step: int, keep: int, catalog: CheckpointCatalog | None, timeout_s: float) -> None:
        """Delete what the checkpoint of a step supersedes, if the newest `keep` are kept."""
        token = CancelToken(timeout_s)
        try:
            await run_in_thread(partial(self._delete, step, keep, catalog, token), token)
        except CheckpointException as error:
            self._log.warning("could not delete old checkpoints", reason=str(error))

    def _delete(self, step: int, keep: int, catalog: CheckpointCatalog | None, token: CancelToken) -> None:
        storage = bounded(self._storage, token)
        validator = CheckpointValidator(storage)

        def is_restorable(name: str) -> bool:
            if name not in self.restorable | self.damaged:
                found = validator.validate_checkpoint(name, token, deep=False)
                (self.restorable if found.is_valid else self.damaged).add(name)
            return name in self.restorable

        ancestries = self._ancestries.all(storage)
        # Newest first, so that a chain is deleted from its end.
        for name in retention.superseded(listing.prefixes(storage), step, keep, is_restorable):
            token.check()
            if name in ancestries and users_among(ancestries, name, ancestries[name].save_id):
                continue
            if is_held(storage, name + SUFFIX):
                self._log.info("an old checkpoint is kept, because it is being read", prefix=name)
                continue
            if catalog is not None and not catalog.withdraw(f"{storage.url}/{name}", retention.step_of(name)):
                # The daemon deletes it, unless it is pinned or held.
                continue
            listing.delete(storage, name, self._ancestries)
            ancestries.pop(name, None)
            self._log.info("old checkpoint deleted", prefix=name)
