"""`forgectl ckpt rm`: having checkpoints no more, and what is left of others.

Law: nobody's files are removed unasked. A checkpoint goes when it is named; what is left of a save that came to nothing
goes when it is named, too, or when it is certain that it is that, and old enough that nobody is at it. What a deletion
has left nobody needs to be asked about again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.model import is_prefix
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.storage import listing
from forged.cli.ckpt.interruptible import acting
from forged.cli.ckpt.ls import leftover, leftover_in_words
from forged.cli.ckpt.target import folder, place
from forged.cli.forgectl import tables
from forged.cli.forgectl.output import print_json
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_FAILED, EXIT_OK, remark
from forged.errors import ConfigError, RequestRefused

CHECKPOINT, UNFINISHED, HALF_DELETED = "checkpoint", "unfinished", "half_deleted"
QUIET_S = 3600.0
"""A save that has written nothing for so long is not under way any more."""
UNREADABLE = frozenset({ExceptionType.CORRUPTED_CHECKPOINT, ExceptionType.INCOMPATIBLE_VERSION})


@dataclass(frozen=True, slots=True)
class _Doomed:
    """Something that is to go."""

    prefix: str
    what: str
    files: int
    size_bytes: int
    words: str
    """What somebody is asked about."""

    @property
    def row(self) -> dict[str, Any]:
        """It for programs."""
        return {"prefix": self.prefix, "what": self.what, "files": self.files, "size_bytes": self.size_bytes}


@acting
def remove(options: Options, token: CancelToken) -> int:
    """Remove what is named."""
    spared: Sequence[str] = ()
    if options.unfinished:
        storage, doomed, spared = _leftovers(options.where, token)
    else:
        storage, prefix = place(options.where, token)
        doomed = [_checkpoint(storage, prefix)]
    if not _is_meant(options, doomed):
        print("nothing was deleted")
        return EXIT_FAILED
    for one in doomed:
        _remove(storage, one)
        if not options.json:
            print(f"{tables.field('', one.prefix)} is deleted: {_amount(one.files, one.size_bytes)}")
    _conclude(options, storage, doomed, spared)
    return EXIT_OK


def _conclude(options: Options, storage: Storage, doomed: Sequence[_Doomed], spared: Sequence[str]) -> None:
    if options.json:
        print_json({"deleted": [one.row for one in doomed], "spared": list(spared)})
        return
    if not doomed:
        print(f"nothing to delete in {tables.field('', storage.url)}")
    for prefix in spared:
        print(f"{tables.field('', prefix)} stays: name it to delete it, if no save is under way there")


# What is meant.


def _checkpoint(storage: Storage, prefix: str) -> _Doomed:
    """A checkpoint, or what is left of one."""
    if listing.checkpoint_exists(storage, prefix):
        return _whole(storage, prefix)
    if listing.is_being_deleted(storage, prefix):
        return _half_deleted(storage, prefix)
    entries = listing.save_files(storage, prefix)
    if entries:
        said = leftover_in_words(leftover(prefix, entries), time.time())
        raise RequestRefused(
            "checkpoint_unfinished",
            f"{prefix} has no manifest ({said}): a save is under way there, or one came to nothing",
            "--unfinished deletes it all the same",
        )
    raise listing.missing_checkpoint(storage, prefix)


def _whole(storage: Storage, prefix: str) -> _Doomed:
    try:
        manifest = listing.read_manifest(storage, prefix)
    except CheckpointException as error:
        if error.type not in UNREADABLE:
            raise
        entries = listing.save_files(storage, prefix)
        files, size, why = len(entries), sum(entry.size for entry in entries), ", whose manifest cannot be read"
    else:
        files, size, why = len(listing.files_of(manifest)), manifest.size_bytes, ""
    return _Doomed(
        prefix, CHECKPOINT, files, size, f"the checkpoint {prefix} in {storage.url}{why}: {_amount(files, size)}"
    )


def _half_deleted(storage: Storage, prefix: str) -> _Doomed:
    entries = listing.save_files(storage, prefix)
    return _Doomed(prefix, HALF_DELETED, len(entries), sum(entry.size for entry in entries), "")


def _leftovers(where: str, token: CancelToken) -> tuple[Storage, list[_Doomed], list[str]]:
    """What is left of the save that is named, or else of all in the folder; and what is left alone there."""
    found = _named(where, token)
    if found is not None:
        return (*found, [])
    storage, now = folder(where, token), time.time()
    tombstones = listing.tombstones(storage)
    doomed = [_half_deleted(storage, prefix) for prefix in filter(is_prefix, tombstones)]
    spared = [prefix for prefix in tombstones if not is_prefix(prefix)]
    for prefix, entries in listing.unfinished_saves(storage).items():
        row = leftover(prefix, entries)
        if row["of_a_save"] and now - row["written_at"] > QUIET_S:
            doomed.append(_unfinished(storage, row, now))
        else:
            spared.append(prefix)
    return storage, doomed, spared


def _named(where: str, token: CancelToken) -> tuple[Storage, list[_Doomed]] | None:
    """What is left of the one that is named; None where the name is not that of one."""
    try:
        storage, prefix = place(where, token)
    except CheckpointException as error:
        if error.type is not ExceptionType.VALIDATION_FAILED:
            raise
        return None
    if listing.checkpoint_exists(storage, prefix):
        raise RequestRefused(
            "checkpoint_finished", f"{prefix} in {storage.url} is a checkpoint", "without --unfinished it is deleted"
        )
    if listing.is_being_deleted(storage, prefix):
        return storage, [_half_deleted(storage, prefix)]
    entries = listing.save_files(storage, prefix)
    return (storage, [_unfinished(storage, leftover(prefix, entries), time.time())]) if entries else None


def _unfinished(storage: Storage, row: dict[str, Any], now: float) -> _Doomed:
    words = f"what lies under {row['prefix']} in {storage.url} without a manifest: {leftover_in_words(row, now)}"
    return _Doomed(row["prefix"], UNFINISHED, row["files"], row["size_bytes"], words)


# What is done.


def _is_meant(options: Options, doomed: Sequence[_Doomed]) -> bool:
    """Whether somebody has said so."""
    asked = [one.words for one in doomed if one.what != HALF_DELETED]
    if options.yes or not asked:
        return True
    if options.json or not (sys.stdin and sys.stdin.isatty()):
        raise ConfigError(
            "consent_missing", f"this would delete {'; '.join(asked)}", "add --yes where nobody can be asked"
        )
    remark("\n".join(["this deletes", *(f"  {words}" for words in asked)]))
    print("go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _remove(storage: Storage, one: _Doomed) -> None:
    if one.what == UNFINISHED:
        listing.delete_unfinished(storage, one.prefix)
    else:
        listing.delete(storage, one.prefix)


def _amount(files: int, size_bytes: int) -> str:
    return f"{tables.counted(files, 'file')}, {tables.size(size_bytes)}"
