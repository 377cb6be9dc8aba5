"""Saves a checkpoint from slots, without the processes that have staged it.

Invariants:
- What is published is what was staged: every chunk is verified as it is written.
- An interrupted save is begun again from its first file; files of other saves are not touched.
- The manifest is published last. After an error there is no checkpoint, unless the error is `OutcomeUnknown`.
- The files have other names than those of the ranks, which may write the same save when the host is away for long.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.rank_group import OutcomeUnknown
from forged.checkpoint.saving.files.parts import write_durably
from forged.checkpoint.saving.publication import publish_manifest
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.slot_files import SlotSet


def save_slots(storage: Storage, slots: SlotSet, token: CancelToken) -> bool:
    """Save the checkpoint that the slots hold; returns whether it did not exist yet."""
    storage, manifest = bounded(storage, token), _with_own_files(slots.manifest)
    if _is_saved(storage, manifest.prefix, manifest.save_id):
        return False
    listing.require_free(storage, manifest.prefix)
    files = [part.file for part in manifest.parts]
    # What an earlier try has left. No other save has files of these names.
    storage.delete(files)
    try:
        for file, part in zip(files, slots.manifest.parts, strict=True):
            write_durably(storage, file, slots.parts[part.file], token)
        slots.require_unchanged()
        publish_manifest(storage, manifest)
        _require_files(storage, manifest)
    except OutcomeUnknown:
        raise
    except BaseException:
        with suppress(CheckpointException):
            storage.delete(files)
            if _is_saved(storage, manifest.prefix, manifest.save_id):
                # The ranks have published it.
                return False
        raise
    return True


def _with_own_files(manifest: Manifest) -> Manifest:
    """The manifest with the names of the files that the host writes."""
    prefix, save_id, world_size = manifest.prefix, manifest.save_id, manifest.world_size
    parts = [
        msgspec.structs.replace(part, file=listing.host_part_name(prefix, save_id, part.rank, world_size))
        for part in manifest.parts
    ]
    return msgspec.structs.replace(manifest, parts=parts)


def _require_files(storage: Storage, manifest: Manifest) -> None:
    """Withdraw a manifest whose files were deleted before it was published, as those of an earlier try that has failed.

    A deletion looks for a manifest after it has deleted files, so one of the two notices the other.
    """
    if all(listing.file_exists(storage, part.file) for part in manifest.parts):
        return
    storage.delete([manifest.path])
    raise CheckpointException(
        f"files of {manifest.prefix} were deleted while it was saved",
        manifest.prefix,
        ExceptionType.SAVE_FAILED,
        code="checkpoint_file_missing",
        fix="save it again",
        retryable=True,
    )


def _is_saved(storage: Storage, prefix: str, save_id: str) -> bool:
    """Whether this save exists as a checkpoint."""
    if not listing.checkpoint_exists(storage, prefix):
        return False
    return listing.read_manifest(storage, prefix).save_id == save_id
