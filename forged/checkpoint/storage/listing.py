"""The checkpoints in a storage: what is there, what is not, and what is left of what was.

Law: a checkpoint is there when its manifest is and no tombstone stands in its place. What is being saved has no
manifest yet, and what is being deleted has none any more: neither is seen, and both can be cleared away.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import MANIFEST_BYTES_MAX, SUFFIX, TOMBSTONE, Manifest, decode
from forged.checkpoint.model import CheckpointInfo, check_prefix
from forged.checkpoint.ports import Entry, Storage

MISSING = "checkpoint_file_missing"
SAVE_ID_BYTES = 4
LOOKS = 2
_SECTION = r"(?:model|optimizer|state|rank-[0-9]{5,7})"
_PART = rf"(?:{_SECTION}|(?:{_SECTION}-)?[0-9]{{5,7}}-of-[0-9]{{5,7}})\.(?:safetensors|packed)"
_INDEX = rf"{_SECTION}\.safetensors\.index\.json"
_OF_A_SAVE = re.compile(rf'"[0-9a-f]{{8}}\.{_PART}"'.encode())
_NOTE = r"[0-9]{5,7}\.(?:receipt|refusal)"
_OURS = re.compile(rf"[0-9a-f]{{8}}\.(?:{_PART}|{_INDEX}|{_NOTE})|{_INDEX}")
"""What a save makes under its prefix; but for the indexes, named with what tells it from others."""


def part_name(prefix: str, save_id: str, rank: int, world_size: int, *, is_packed: bool) -> str:
    """The file of one rank."""
    kind = "packed" if is_packed else "safetensors"
    return f"{prefix}/{save_id}.{rank:05d}-of-{world_size:05d}.{kind}"


def receipt_name(prefix: str, save_id: str, rank: int) -> str:
    """Where a rank says what it has written."""
    return f"{prefix}/{save_id}.{rank:05d}.receipt"


def refusal_name(prefix: str, save_id: str, rank: int) -> str:
    """Where the root says to a rank that a save has failed."""
    return f"{prefix}/{save_id}.{rank:05d}.refusal"


def read_manifest(storage: Storage, prefix: str) -> Manifest:
    """The manifest of a checkpoint."""
    path = check_prefix(prefix) + SUFFIX
    try:
        data = storage.read(path, MANIFEST_BYTES_MAX)
    except CheckpointException as error:
        if error.code != MISSING:
            raise
        raise missing_checkpoint(storage, prefix) from None
    if _is_there(storage, prefix + TOMBSTONE):
        raise missing_checkpoint(storage, prefix)
    return decode(data, path)


def missing_checkpoint(storage: Storage, prefix: str) -> CheckpointException:
    """There is no such checkpoint."""
    return CheckpointException(
        f"there is no checkpoint {prefix} in {storage.url}",
        prefix,
        ExceptionType.LOAD_FAILED,
        code="checkpoint_missing",
        fix=f"`forgectl ckpt ls {shlex.quote(storage.url)}` shows which there are",
    )


def checkpoint_exists(storage: Storage, prefix: str) -> bool:
    """Whether there is such a checkpoint."""
    return _is_there(storage, prefix + SUFFIX) and not _is_there(storage, prefix + TOMBSTONE)


def is_being_deleted(storage: Storage, prefix: str) -> bool:
    """Whether somebody has begun to delete it."""
    return _is_there(storage, prefix + TOMBSTONE)


def prefixes(storage: Storage, under: str = "") -> list[str]:
    """The names of all checkpoints, in their order."""
    names = {entry.name for entry in storage.entries(under)}
    found = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
    return sorted(prefix for prefix in found if prefix + TOMBSTONE not in names)


def manifests(storage: Storage, under: str = "") -> Iterator[tuple[str, Manifest | CheckpointException]]:
    """All checkpoints; those whose manifest cannot be read with the reason."""
    for prefix in prefixes(storage, under):
        try:
            yield prefix, read_manifest(storage, prefix)
        except CheckpointException as error:
            if error.code != "checkpoint_missing":
                yield prefix, error


def info_of(manifest: Manifest) -> CheckpointInfo:
    """What is shown of a checkpoint in a list."""
    return CheckpointInfo(
        manifest.prefix,
        manifest.version,
        manifest.created_at,
        manifest.world_size,
        manifest.size_bytes,
        manifest.layout,
    )


def files_of(manifest: Manifest) -> list[str]:
    """The files of a checkpoint, besides its manifest."""
    return [part.file for part in manifest.parts] + [*manifest.extra_files]


def delete(storage: Storage, prefix: str) -> None:
    """Have a checkpoint no more: gone as soon as its tombstone stands, and its files behind that."""
    path, tombstone = check_prefix(prefix) + SUFFIX, prefix + TOMBSTONE
    is_known = _is_there(storage, path)
    if not is_known and not _is_there(storage, tombstone):
        raise missing_checkpoint(storage, prefix)
    try:
        if is_known:
            storage.move(path, tombstone)
        finish_deletion(storage, prefix)
    except CheckpointException as error:
        # Somebody else has deleted it at the same time.
        if error.code != MISSING:
            raise


def finish_deletion(storage: Storage, prefix: str) -> None:
    """Delete what a tombstone stands for, and then the tombstone."""
    path, tombstone = prefix + SUFFIX, prefix + TOMBSTONE
    said = storage.read(tombstone, MANIFEST_BYTES_MAX)
    # Who put it there may have died before it was durable, and the manifest would be back without what it names.
    storage.sync_names([tombstone])
    try:
        manifest = decode(said, tombstone)
        # Besides what it names, what its save has left under names that no other save gives.
        own = [entry.name for entry in save_files(storage, prefix) if _is_of_save(entry.name, manifest)]
        for name, size in manifest.extra_files.items():
            # What a later save has put in its place is not to go; so it goes as soon as it was looked at.
            if _leads_to(storage, name, size, manifest):
                storage.delete([name])
        storage.delete({*(part.file for part in manifest.parts), *own})
    except CheckpointException as error:
        if error.type not in {ExceptionType.CORRUPTED_CHECKPOINT, ExceptionType.INCOMPATIBLE_VERSION}:
            raise
        # It does not say what its files are; what lies under its name is of no use to anybody.
        storage.delete([entry.name for entry in save_files(storage, prefix)])
    if _is_there(storage, path) and storage.read(path, MANIFEST_BYTES_MAX) == said:
        # A storage that moves by copying was interrupted in between.
        storage.delete([path])
    # Where others were faster, that of a later checkpoint may stand there by now; so it goes as soon as it was looked
    # at, also where it has gone already: who died behind that may not have made it durable.
    if _small(storage, tombstone, MANIFEST_BYTES_MAX) in {said, None}:
        storage.delete([tombstone])


def _is_of_save(name: str, manifest: Manifest) -> bool:
    return bool(manifest.save_id) and name.startswith(f"{manifest.prefix}/{manifest.save_id}.")


def _leads_to(storage: Storage, name: str, size: int, manifest: Manifest) -> bool:
    """Whether a document for other tools is still the one that names files of this checkpoint."""
    said = _small(storage, name, size)
    return said is not None and any(b'"%s"' % part.file.rpartition("/")[2].encode() in said for part in manifest.parts)


def is_replaceable_index(storage: Storage, index: str) -> bool:
    """Whether there is no such index, or one of files that a save has made."""
    for _ in range(LOOKS):
        said = _small(storage, index, MANIFEST_BYTES_MAX)
        if said is not None:
            return _OF_A_SAVE.search(said) is not None
        if not _is_there(storage, index):
            return True
        # It may have come between the two looks.
    return False


def delete_unfinished(storage: Storage, prefix: str) -> list[str]:
    """Delete what saves that came to nothing have left under a prefix. There must be none under way."""
    if checkpoint_exists(storage, prefix):
        return []
    names = [entry.name for entry in save_files(storage, prefix)]
    storage.delete(names)
    return names


def require_free(storage: Storage, prefix: str) -> None:
    """Refuse a name that is taken."""
    path = prefix + SUFFIX
    if _is_there(storage, prefix + TOMBSTONE):
        raise CheckpointException(
            f"{prefix} is being deleted from {storage.url}",
            prefix,
            ExceptionType.SAVE_FAILED,
            code="checkpoint_being_deleted",
            fix=f"`forgectl ckpt rm {prefix}` finishes a deletion that was interrupted",
            retryable=True,
        )
    if _is_there(storage, path):
        raise CheckpointException(
            f"there is a checkpoint {prefix} in {storage.url} already",
            prefix,
            ExceptionType.SAVE_FAILED,
            code="checkpoint_exists",
            fix="give this one another name, or delete that one first",
        )


def tombstones(storage: Storage) -> list[str]:
    """The checkpoints that somebody has begun to delete."""
    return sorted(entry.name.removesuffix(TOMBSTONE) for entry in storage.entries() if entry.name.endswith(TOMBSTONE))


def save_files(storage: Storage, prefix: str) -> list[Entry]:
    """The files that saves have made under a prefix, whatever became of them."""
    lead = f"{prefix}/"
    return [entry for entry in storage.entries(lead) if _OURS.fullmatch(entry.name.removeprefix(lead))]


def unfinished_saves(storage: Storage) -> dict[str, list[Entry]]:
    """The files of saves that have come to nothing, or are still under way, by prefix."""
    names = {entry.name: entry for entry in storage.entries()}
    found: dict[str, list[Entry]] = {}
    for name, entry in names.items():
        prefix, _, file = name.rpartition("/")
        if prefix and _OURS.fullmatch(file) and prefix + SUFFIX not in names and prefix + TOMBSTONE not in names:
            found.setdefault(prefix, []).append(entry)
    return dict(sorted(found.items()))


def default_prefix(now: float, draw: Callable[[int], bytes]) -> str:
    """A name that nobody else gives: the time, and something drawn."""
    return f"checkpoint_{datetime.fromtimestamp(now, UTC):%Y%m%d_%H%M%S}_{draw(SAVE_ID_BYTES).hex()}"


def has_content(storage: Storage, name: str, data: bytes) -> bool:
    """Whether a small file is there with just these bytes."""
    return _small(storage, name, len(data)) == data


def _small(storage: Storage, name: str, size: int) -> bytes | None:
    """A file that has no more bytes than that; None where there is none."""
    try:
        return storage.read(name, size)
    except CheckpointException as error:
        if error.code not in {MISSING, "checkpoint_file_large"}:
            raise
        return None


def _is_there(storage: Storage, name: str) -> bool:
    try:
        with storage.open(name):
            return True
    except CheckpointException as error:
        if error.code != MISSING:
            raise
        return False
