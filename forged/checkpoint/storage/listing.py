"""The checkpoints in a storage: lists, deletes, and finds the files of unfinished saves.

Invariants:
- A checkpoint exists if and only if its manifest exists and its tombstone does not.
- A checkpoint that is being saved has no manifest yet; one that is being deleted has a tombstone in its place. Neither
  is listed, and the files of both can be deleted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import MANIFEST_BYTES_MAX, SUFFIX, TOMBSTONE, Manifest, decode
from forged.checkpoint.model import CheckpointInfo, check_prefix
from forged.checkpoint.ports import Storage, StoredFile

MISSING = "checkpoint_file_missing"
SAVE_ID_BYTES = 4
INDEX_READS_MAX = 2
_SECTION = r"(?:model|optimizer|state|rank-[0-9]{5,7})"
_PART = rf"(?:{_SECTION}|(?:{_SECTION}-)?[0-9]{{5,7}}-of-[0-9]{{5,7}})\.(?:safetensors|packed)"
_INDEX = rf"{_SECTION}\.safetensors\.index\.json"
_NAMES_SAVE_FILE = re.compile(rf'"[0-9a-f]{{8}}\.{_PART}"'.encode())
_RECEIPT = r"[0-9]{5,7}\.(?:receipt|refusal)"
_SAVE_FILE = re.compile(rf"[0-9a-f]{{8}}\.(?:{_PART}|{_INDEX}|{_RECEIPT})|{_INDEX}")
"""The files of a save under its prefix. All names but those of indexes contain the save id."""


def part_name(prefix: str, save_id: str, rank: int, world_size: int, *, is_packed: bool) -> str:
    """The name of a rank's part."""
    kind = "packed" if is_packed else "safetensors"
    return f"{prefix}/{save_id}.{rank:05d}-of-{world_size:05d}.{kind}"


def receipt_name(prefix: str, save_id: str, rank: int) -> str:
    """The name of a rank's receipt."""
    return f"{prefix}/{save_id}.{rank:05d}.receipt"


def refusal_name(prefix: str, save_id: str, rank: int) -> str:
    """The name of the root's refusal for a rank."""
    return f"{prefix}/{save_id}.{rank:05d}.refusal"


def read_manifest(storage: Storage, prefix: str) -> Manifest:
    """Read a checkpoint's manifest; `checkpoint_missing` if the checkpoint does not exist."""
    path = check_prefix(prefix) + SUFFIX
    try:
        data = storage.read(path, MANIFEST_BYTES_MAX)
    except CheckpointException as error:
        if error.code != MISSING:
            raise
        raise missing_checkpoint(storage, prefix) from None
    if _exists(storage, prefix + TOMBSTONE):
        raise missing_checkpoint(storage, prefix)
    return decode(data, path)


def missing_checkpoint(storage: Storage, prefix: str) -> CheckpointException:
    """The error for a checkpoint that does not exist."""
    return CheckpointException(
        f"checkpoint {prefix} does not exist in {storage.url}",
        prefix,
        ExceptionType.LOAD_FAILED,
        code="checkpoint_missing",
        fix=f"`forgectl ckpt ls {shlex.quote(storage.url)}` lists the checkpoints",
    )


def checkpoint_exists(storage: Storage, prefix: str) -> bool:
    return _exists(storage, prefix + SUFFIX) and not _exists(storage, prefix + TOMBSTONE)


def is_being_deleted(storage: Storage, prefix: str) -> bool:
    """Whether a deletion of the checkpoint has begun and not ended."""
    return _exists(storage, prefix + TOMBSTONE)


def prefixes(storage: Storage, under: str = "") -> list[str]:
    """The prefixes of all checkpoints, sorted."""
    names = {entry.name for entry in storage.entries(under)}
    found = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
    return sorted(prefix for prefix in found if prefix + TOMBSTONE not in names)


def manifests(storage: Storage, under: str = "") -> Iterator[tuple[str, Manifest | CheckpointException]]:
    """The manifests of all checkpoints; for an unreadable one its error."""
    for prefix in prefixes(storage, under):
        try:
            yield prefix, read_manifest(storage, prefix)
        except CheckpointException as error:
            if error.code != "checkpoint_missing":
                yield prefix, error


def info_of(manifest: Manifest) -> CheckpointInfo:
    """A manifest's summary for listings."""
    return CheckpointInfo(
        manifest.prefix,
        manifest.version,
        manifest.created_at,
        manifest.world_size,
        manifest.size_bytes,
        manifest.layout,
        manifest.step,
        manifest.epoch,
    )


def files_of(manifest: Manifest) -> list[str]:
    """The files that a manifest names."""
    return [part.file for part in manifest.parts] + [*manifest.extra_files]


def delete(storage: Storage, prefix: str) -> None:
    """Delete a checkpoint: rename its manifest to a tombstone, then delete its files, then the tombstone."""
    path, tombstone = check_prefix(prefix) + SUFFIX, prefix + TOMBSTONE
    has_manifest = _exists(storage, path)
    if not has_manifest and not _exists(storage, tombstone):
        raise missing_checkpoint(storage, prefix)
    try:
        if has_manifest:
            storage.move(path, tombstone)
        finish_deletion(storage, prefix)
    except CheckpointException as error:
        # Another process deletes it at the same time.
        if error.code != MISSING:
            raise


def finish_deletion(storage: Storage, prefix: str) -> None:
    """Delete the files of a tombstone, and then the tombstone."""
    path, tombstone = prefix + SUFFIX, prefix + TOMBSTONE
    data = storage.read(tombstone, MANIFEST_BYTES_MAX)
    # Its writer may have died before it was durable; the manifest would come back without its files.
    storage.sync_names([tombstone])
    try:
        manifest = decode(data, tombstone)
        # Files of this save that its manifest does not name have names with its save id.
        own = [entry.name for entry in save_files(storage, prefix) if _is_of_save(entry.name, manifest)]
        for name, size in manifest.extra_files.items():
            # A later save may replace the index, so it is checked just before it is deleted.
            if _names_files_of(storage, name, size, manifest):
                storage.delete([name])
        storage.delete({*(part.file for part in manifest.parts), *own})
    except CheckpointException as error:
        if error.type not in {ExceptionType.CORRUPTED_CHECKPOINT, ExceptionType.INCOMPATIBLE_VERSION}:
            raise
        # An unreadable tombstone names no files, so all files of saves under the prefix are deleted.
        storage.delete([entry.name for entry in save_files(storage, prefix)])
    if _exists(storage, path) and storage.read(path, MANIFEST_BYTES_MAX) == data:
        # A storage that renames by copying was interrupted before it deleted the source.
        storage.delete([path])
    # The tombstone may belong to a later checkpoint by now, so it is checked just before it is deleted. It is deleted
    # also if it is missing, because the process that removed it may have died before the removal was durable.
    if _read_small(storage, tombstone, MANIFEST_BYTES_MAX) in {data, None}:
        storage.delete([tombstone])


def _is_of_save(name: str, manifest: Manifest) -> bool:
    return bool(manifest.save_id) and name.startswith(f"{manifest.prefix}/{manifest.save_id}.")


def _names_files_of(storage: Storage, name: str, size: int, manifest: Manifest) -> bool:
    """Whether an index still names files of this checkpoint."""
    data = _read_small(storage, name, size)
    return data is not None and any(b'"%s"' % part.file.rpartition("/")[2].encode() in data for part in manifest.parts)


def is_replaceable_index(storage: Storage, index: str) -> bool:
    """Whether an index is missing, or names files of a save."""
    for _ in range(INDEX_READS_MAX):
        data = _read_small(storage, index, MANIFEST_BYTES_MAX)
        if data is not None:
            return _NAMES_SAVE_FILE.search(data) is not None
        if not _exists(storage, index):
            return True
        # It was created between the two reads.
    return False


def delete_unfinished(storage: Storage, prefix: str) -> list[str]:
    """Delete the files of unfinished saves under a prefix. No save may be in progress there."""
    if checkpoint_exists(storage, prefix):
        return []
    names = [entry.name for entry in save_files(storage, prefix)]
    storage.delete(names)
    return names


def require_free(storage: Storage, prefix: str) -> None:
    """Refuse a prefix that is taken."""
    path = prefix + SUFFIX
    if _exists(storage, prefix + TOMBSTONE):
        raise CheckpointException(
            f"{prefix} is being deleted from {storage.url}",
            prefix,
            ExceptionType.SAVE_FAILED,
            code="checkpoint_being_deleted",
            fix=f"`forgectl ckpt rm {prefix}` finishes a deletion that was interrupted",
            retryable=True,
        )
    if _exists(storage, path):
        raise CheckpointException(
            f"checkpoint {prefix} exists already in {storage.url}",
            prefix,
            ExceptionType.SAVE_FAILED,
            code="checkpoint_exists",
            fix="use another prefix, or delete that checkpoint first",
        )


def tombstones(storage: Storage) -> list[str]:
    """The prefixes of checkpoints whose deletion has begun and not ended."""
    return sorted(entry.name.removesuffix(TOMBSTONE) for entry in storage.entries() if entry.name.endswith(TOMBSTONE))


def save_files(storage: Storage, prefix: str) -> list[StoredFile]:
    """All files of saves under a prefix, finished or not."""
    lead = f"{prefix}/"
    return [entry for entry in storage.entries(lead) if _SAVE_FILE.fullmatch(entry.name.removeprefix(lead))]


def unfinished_saves(storage: Storage) -> dict[str, list[StoredFile]]:
    """The files of saves without a manifest, by prefix: failed, or still in progress."""
    names = {entry.name: entry for entry in storage.entries()}
    found: dict[str, list[StoredFile]] = {}
    for name, entry in names.items():
        prefix, _, file = name.rpartition("/")
        if prefix and _SAVE_FILE.fullmatch(file) and prefix + SUFFIX not in names and prefix + TOMBSTONE not in names:
            found.setdefault(prefix, []).append(entry)
    return dict(sorted(found.items()))


def default_prefix(now: float, draw: Callable[[int], bytes]) -> str:
    """A unique prefix: the time and random digits."""
    return f"checkpoint_{datetime.fromtimestamp(now, UTC):%Y%m%d_%H%M%S}_{draw(SAVE_ID_BYTES).hex()}"


def has_content(storage: Storage, name: str, data: bytes) -> bool:
    """Whether a small file has exactly these bytes."""
    return _read_small(storage, name, len(data)) == data


def _read_small(storage: Storage, name: str, size: int) -> bytes | None:
    """The bytes of a file; None if it is missing or larger than `size`."""
    try:
        return storage.read(name, size)
    except CheckpointException as error:
        if error.code not in {MISSING, "checkpoint_file_large"}:
            raise
        return None


def _exists(storage: Storage, name: str) -> bool:
    try:
        with storage.open(name):
            return True
    except CheckpointException as error:
        if error.code != MISSING:
            raise
        return False
