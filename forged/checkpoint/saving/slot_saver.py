"""Saves a checkpoint from slots, without the processes that have staged it.

Invariants:
- What is published is what was staged: every chunk is verified as it is written.
- An interrupted save is begun again from its first file; files of other saves are not touched.
- The manifest is published last. After an error there is no checkpoint, unless the error is `OutcomeUnknown`.
"""

from __future__ import annotations

from contextlib import suppress

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.rank_group import OutcomeUnknown
from forged.checkpoint.saving.parts import write_durably
from forged.checkpoint.saving.pipeline import publish_manifest
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.slot_files import SlotSet


def save_slots(storage: Storage, slots: SlotSet, token: CancelToken) -> bool:
    """Save the checkpoint that the slots hold; returns whether it did not exist yet."""
    storage, manifest = bounded(storage, token), slots.manifest
    if _is_saved(storage, manifest.prefix, manifest.save_id):
        return False
    listing.require_free(storage, manifest.prefix)
    files = [part.file for part in manifest.parts]
    # What an earlier try has left. No other save has files of these names.
    storage.delete(files)
    try:
        for file in files:
            write_durably(storage, file, slots.parts[file], token)
        slots.require_unchanged()
        publish_manifest(storage, manifest)
    except OutcomeUnknown:
        raise
    except BaseException:
        with suppress(CheckpointException):
            storage.delete(files)
        raise
    return True


def _is_saved(storage: Storage, prefix: str, save_id: str) -> bool:
    """Whether this save exists as a checkpoint."""
    if not listing.checkpoint_exists(storage, prefix):
        return False
    return listing.read_manifest(storage, prefix).save_id == save_id
