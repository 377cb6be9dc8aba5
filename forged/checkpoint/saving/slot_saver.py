"""Saves a checkpoint from slots, without the processes that have staged it.

Invariants:
- What is published is what was staged: every chunk is verified as it is written.
- An interrupted save is begun again from its first file; files of other saves are not touched.
- The manifest is published last. After an error there is no checkpoint, unless the error is `OutcomeUnknown`.
- The files have other names than those of the ranks, which may write the same save when the host is away for long.
  Those of a damaged checkpoint keep their names, which the checkpoints that use them know.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def save_slots(storage: Storage, slots: SlotSet, token: CancelToken, *, is_damaged: bool = False) -> bool:
    """Save the checkpoint that the slots hold; returns whether it did not exist yet, or was damaged."""
    storage, manifest = bounded(storage, token), _with_own_files(slots.manifest)
    if is_damaged and _rewrite(storage, slots, token):
        return True
    if _is_saved(storage, manifest.prefix, manifest.save_id):
        return False
    listing.require_free(storage, manifest.prefix)
    files = [part.file for part in manifest.parts]
    # What an earlier try has left. No other save has files of these names.
    storage.delete(files)
    try:
        _write(storage, slots, files, token)
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


def _rewrite(storage: Storage, slots: SlotSet, token: CancelToken) -> bool:
    """Replace the files of a damaged checkpoint; false if its manifest is damaged, or names others: it is deleted."""
    path, found = slots.manifest.path, None
    if not listing.checkpoint_exists(storage, slots.manifest.prefix):
        return False
    try:
        found = listing.read_manifest(storage, slots.manifest.prefix)
    except CheckpointException as error:
        if error.type is not ExceptionType.CORRUPTED_CHECKPOINT:
            raise
    if found is not None and found.save_id != slots.manifest.save_id:
        # Another save has the name by now.
        return False
    named = set() if found is None else {part.file for part in found.own_parts}
    for manifest in (slots.manifest, _with_own_files(slots.manifest)):
        files = [part.file for part in manifest.parts]
        if named.issuperset(files):
            storage.delete(files)
            _write(storage, slots, files, token)
            return True
    storage.delete([path])
    return False


def _write(storage: Storage, slots: SlotSet, files: Sequence[str], token: CancelToken) -> None:
    for file, part in zip(files, slots.manifest.parts, strict=True):
        write_durably(storage, file, slots.parts[part.file], token)
    slots.require_unchanged()


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
