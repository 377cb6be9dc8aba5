"""`forgectl ckpt rm`: deletes checkpoints, and files of unfinished saves and deletions.

Invariants:
- A checkpoint is deleted only if it is named, and only with `--force` if another checkpoint needs it.
- Files of a failed save are deleted only with `--unfinished`; in a whole folder, only if a save wrote all of them, the
  last more than `QUIET_S` ago.
- An interrupted deletion is finished without confirmation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.model import is_prefix
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.ancestry import AncestryCache, needed, users_among
from forged.cli.ckpt.command import checkpoint_command
from forged.cli.ckpt.ls import leftover_row, leftover_text
from forged.cli.ckpt.target import storage_and_prefix, storage_of
from forged.cli.confirmation import is_confirmed
from forged.cli.forgectl import tables
from forged.cli.forgectl.output import print_json
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_FAILED, EXIT_OK
from forged.errors import RequestRefused

CHECKPOINT, UNFINISHED, HALF_DELETED = "checkpoint", "unfinished", "half_deleted"
QUIET_S = 3600.0
"""A save that wrote nothing for so long is no longer running."""
UNREADABLE = frozenset({ExceptionType.CORRUPTED_CHECKPOINT, ExceptionType.INCOMPATIBLE_VERSION})


@dataclass(frozen=True, slots=True)
class _Deletion:
    """Something to delete."""

    prefix: str
    what: str
    files: int
    size_bytes: int
    words: str
    """The description for the confirmation."""

    @property
    def row(self) -> dict[str, Any]:
        """The row for JSON output."""
        return {"prefix": self.prefix, "what": self.what, "files": self.files, "size_bytes": self.size_bytes}


@checkpoint_command
def remove(options: Options, token: CancelToken) -> int:
    kept: Sequence[str] = ()
    if options.unfinished:
        storage, deletions, kept = _leftovers(options.where, token)
    else:
        storage, prefix = storage_and_prefix(options.where, token)
        deletions = [_checkpoint(storage, prefix, force=options.force)]
    if not is_confirmed(options, [one.words for one in deletions if one.what != HALF_DELETED]):
        print("nothing deleted")
        return EXIT_FAILED
    for one in deletions:
        _remove(storage, one, force=options.force)
        if not options.json:
            print(f"deleted {tables.field('', one.prefix)}: {_amount(one.files, one.size_bytes)}")
    _print_summary(options, storage, deletions, kept)
    return EXIT_OK


def _print_summary(options: Options, storage: Storage, deletions: Sequence[_Deletion], kept: Sequence[str]) -> None:
    if options.json:
        print_json({"deleted": [one.row for one in deletions], "kept": list(kept)})
        return
    if not deletions:
        print(f"nothing to delete in {tables.field('', storage.url)}")
    for prefix in kept:
        print(f"kept {tables.field('', prefix)}: if no save is running there, name it to delete it")


# What to delete.


def _checkpoint(storage: Storage, prefix: str, *, force: bool) -> _Deletion:
    """The deletion of a checkpoint, or of the rest of a partly deleted one."""
    if listing.checkpoint_exists(storage, prefix):
        return _whole(storage, prefix, force=force)
    if listing.is_being_deleted(storage, prefix):
        return _half_deleted(storage, prefix)
    entries = listing.save_files(storage, prefix)
    if entries:
        text = leftover_text(leftover_row(prefix, entries), time.time())
        raise RequestRefused(
            "checkpoint_unfinished",
            f"{prefix} has no manifest ({text}): a save is running there, or failed",
            "add --unfinished to delete the files of a failed save",
        )
    raise listing.missing_checkpoint(storage, prefix)


def _whole(storage: Storage, prefix: str, *, force: bool) -> _Deletion:
    users = _users(storage, prefix)
    if users and not force:
        raise needed(prefix, users)
    try:
        manifest = listing.read_manifest(storage, prefix)
    except CheckpointException as error:
        if error.type not in UNREADABLE:
            raise
        entries = listing.save_files(storage, prefix)
        files, size, why = len(entries), sum(entry.size for entry in entries), " (unreadable manifest)"
    else:
        files, size, why = len(listing.files_of(manifest)), manifest.size_bytes, ""
    return _Deletion(
        prefix,
        CHECKPOINT,
        files,
        size,
        f"checkpoint {prefix} in {storage.url}{why}: {_amount(files, size)}{_needed_by(users)}",
    )


def _users(storage: Storage, prefix: str) -> list[str]:
    """The checkpoints that cannot be restored without this one."""
    ancestries = AncestryCache().all(storage)
    own = ancestries.get(prefix)
    return users_among(ancestries, prefix, "" if own is None else own.save_id)


def _needed_by(users: Sequence[str]) -> str:
    return f"; then {', '.join(users)} cannot be restored" if users else ""


def _half_deleted(storage: Storage, prefix: str) -> _Deletion:
    entries = listing.save_files(storage, prefix)
    return _Deletion(prefix, HALF_DELETED, len(entries), sum(entry.size for entry in entries), "")


def _leftovers(where: str, token: CancelToken) -> tuple[Storage, list[_Deletion], list[str]]:
    """The deletions of unfinished saves, of the named one or of a whole folder; and the names that are kept."""
    found = _unfinished_save(where, token)
    if found is not None:
        return (*found, [])
    storage, now = storage_of(where, token), time.time()
    tombstones = listing.tombstones(storage)
    deletions = [_half_deleted(storage, prefix) for prefix in filter(is_prefix, tombstones)]
    kept = [prefix for prefix in tombstones if not is_prefix(prefix)]
    for prefix, entries in listing.unfinished_saves(storage).items():
        row = leftover_row(prefix, entries)
        if row["written_by_save"] and now - row["written_at"] > QUIET_S:
            deletions.append(_unfinished(storage, row, now))
        else:
            kept.append(prefix)
    return storage, deletions, kept


def _unfinished_save(where: str, token: CancelToken) -> tuple[Storage, list[_Deletion]] | None:
    """The deletion of the named unfinished save; None if there is none of that name."""
    try:
        storage, prefix = storage_and_prefix(where, token)
    except CheckpointException as error:
        if error.type is not ExceptionType.VALIDATION_FAILED:
            raise
        return None
    if listing.is_being_deleted(storage, prefix):
        return storage, [_half_deleted(storage, prefix)]
    entries = listing.unfinished_files(storage, prefix)
    if not entries and listing.checkpoint_exists(storage, prefix):
        raise RequestRefused(
            "checkpoint_finished", f"{prefix} in {storage.url} is a checkpoint", "omit --unfinished to delete it"
        )
    return (storage, [_unfinished(storage, leftover_row(prefix, entries), time.time())]) if entries else None


def _unfinished(storage: Storage, row: dict[str, Any], now: float) -> _Deletion:
    words = f"files that no manifest names under {row['prefix']} in {storage.url}: {leftover_text(row, now)}"
    return _Deletion(row["prefix"], UNFINISHED, row["files"], row["size_bytes"], words)


# Deleting.


def _remove(storage: Storage, one: _Deletion, *, force: bool) -> None:
    if one.what == UNFINISHED:
        listing.delete_unfinished(storage, one.prefix)
    else:
        listing.delete(storage, one.prefix, force=force)


def _amount(files: int, size_bytes: int) -> str:
    return f"{tables.counted(files, 'file')}, {tables.size(size_bytes)}"
