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
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import (
    MANIFEST_BYTES_MAX,
    SUFFIX,
    TOMBSTONE,
    ChainLink,
    Manifest,
    decode,
    decode_ancestry,
)
from forged.checkpoint.model import CheckpointInfo, check_prefix
from forged.checkpoint.ports import Storage, StoredFile, hold, is_held
from forged.checkpoint.storage.ancestry import AncestryCache, needed

MISSING = "checkpoint_file_missing"
SAVE_ID_BYTES = 4
INDEX_READS_MAX = 2
_SECTION = r"(?:model|optimizer|state|rank-[0-9]{5,7})"
_PART = rf"(?:{_SECTION}|(?:{_SECTION}-|host-)?[0-9]{{5,7}}-of-[0-9]{{5,7}})\.(?:safetensors|packed)"
_INDEX = rf"{_SECTION}\.safetensors\.index\.json"
_NAMES_SAVE_FILE = re.compile(rf'"[0-9a-f]{{8}}\.{_PART}"'.encode())
_RECEIPT = r"[0-9]{5,7}\.(?:receipt|refusal|request)"
_COMPACTED = r"[0-9a-f]{8}(?:-[0-9]{5,7}-of-[0-9]{5,7}\.(?:safetensors|packed)|\.manifest)"
_COMPACTED_FILE = re.compile(rf"[0-9a-f]{{8}}\.{_COMPACTED}")
"""The files of a compaction, whose own digits follow the save id."""
_SAVE_FILE = re.compile(rf"[0-9a-f]{{8}}\.(?:{_PART}|{_INDEX}|{_RECEIPT}|{_COMPACTED})|{_INDEX}")
"""The files of a save under its prefix. All names but those of indexes contain the save id."""


def part_name(prefix: str, save_id: str, rank: int, world_size: int, *, is_packed: bool) -> str:
    """The name of a rank's part."""
    kind = "packed" if is_packed else "safetensors"
    return f"{prefix}/{save_id}.{rank:05d}-of-{world_size:05d}.{kind}"


def host_part_name(prefix: str, save_id: str, rank: int, world_size: int) -> str:
    """The name of a rank's part that its host has written."""
    return f"{prefix}/{save_id}.host-{rank:05d}-of-{world_size:05d}.safetensors"


def receipt_name(prefix: str, save_id: str, rank: int) -> str:
    """The name of a rank's receipt."""
    return f"{prefix}/{save_id}.{rank:05d}.receipt"


def refusal_name(prefix: str, save_id: str, rank: int) -> str:
    """The name of the root's refusal for a rank."""
    return f"{prefix}/{save_id}.{rank:05d}.refusal"


def request_name(prefix: str, save_id: str, rank: int) -> str:
    """The name of the root's request to a rank to write its part itself."""
    return f"{prefix}/{save_id}.{rank:05d}.request"


def read_manifest(storage: Storage, prefix: str) -> Manifest:
    """Read a checkpoint's manifest; `checkpoint_missing` if the checkpoint does not exist."""
    return decode(read_manifest_data(storage, prefix), prefix + SUFFIX)


def read_manifest_data(storage: Storage, prefix: str) -> bytes:
    """The bytes of a checkpoint's manifest; `checkpoint_missing` if the checkpoint does not exist."""
    path = check_prefix(prefix) + SUFFIX
    try:
        data = storage.read(path, MANIFEST_BYTES_MAX)
    except CheckpointException as error:
        if error.code != MISSING:
            raise
        raise missing_checkpoint(storage, prefix) from None
    if file_exists(storage, prefix + TOMBSTONE):
        raise missing_checkpoint(storage, prefix)
    return data


def missing_checkpoint(storage: Storage, prefix: str) -> CheckpointException:
    """The error for a checkpoint that does not exist."""
    return CheckpointException(
        f"checkpoint {prefix} does not exist in {storage.url}",
        prefix,
        ExceptionType.LOAD_FAILED,
        code="checkpoint_missing",
        fix=f"`forgectl ckpt ls {shlex.quote(storage.url)}` lists the checkpoints",
    )


def missing_parent(storage: Storage, manifest: Manifest) -> CheckpointException | None:
    """The error for a file of an earlier checkpoint that a checkpoint uses and that is missing; None if there is none.

    The names of files contain the id of their save, so a name that was deleted and used again has other files.
    """
    for link in manifest.links:
        files = (part.file for part in manifest.parts if part.is_referenced and link.has_file(part.file))
        file = next((file for file in files if not file_exists(storage, file)), None)
        if file is None:
            continue
        what, fix = f"its file {file} is missing", f"restore that file from a copy of {link.prefix}"
        if not file_exists(storage, link.prefix + SUFFIX):
            what, fix = "that was deleted", f"restore {link.prefix} from a copy"
        elif _is_other_save(storage, link):
            what = "that was deleted, and another one was saved under its name"
            fix = f"restore {file} from a copy"
        return CheckpointException(
            f"checkpoint {manifest.prefix} needs {link.prefix}: {what}",
            manifest.prefix,
            ExceptionType.CORRUPTED_CHECKPOINT,
            code="checkpoint_parent_missing",
            fix=f"{fix}, or load another checkpoint (`forgectl ckpt ls` lists them)",
        )
    return None


def _is_other_save(storage: Storage, link: ChainLink) -> bool:
    path = link.prefix + SUFFIX
    save_id = _save_id_of(storage.read(path, MANIFEST_BYTES_MAX), path)
    return save_id not in {"", link.save_id}


@contextmanager
def hold_files(storage: Storage, manifest: Manifest) -> Iterator[None]:
    """Be seen to use a checkpoint and the earlier ones whose files it uses, as far as the storage can show it."""
    with ExitStack() as stack:
        for path in (manifest.path, *(link.prefix + SUFFIX for link in manifest.links)):
            stack.enter_context(hold(storage, path))
        yield


def checkpoint_exists(storage: Storage, prefix: str) -> bool:
    return file_exists(storage, prefix + SUFFIX) and not file_exists(storage, prefix + TOMBSTONE)


def is_being_deleted(storage: Storage, prefix: str) -> bool:
    """Whether a deletion of the checkpoint has begun and not ended."""
    return file_exists(storage, prefix + TOMBSTONE)


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
    earlier = [link.prefix for link in manifest.links]
    return CheckpointInfo(
        manifest.prefix,
        manifest.version,
        manifest.created_at,
        manifest.world_size,
        manifest.size_bytes,
        manifest.layout,
        manifest.step,
        manifest.epoch,
        earlier[-1] if earlier else None,
        (*earlier, manifest.prefix),
    )


def files_of(manifest: Manifest) -> list[str]:
    """The files of a checkpoint, without those of earlier ones that it uses."""
    return [part.file for part in manifest.own_parts] + [*manifest.extra_files]


def delete(storage: Storage, prefix: str, ancestries: AncestryCache | None = None, *, force: bool = False) -> None:
    """Delete a checkpoint: rename its manifest to a tombstone, then delete its files, then the tombstone.

    Refuses if other checkpoints use its files, unless `force` is set: `checkpoint_needed`.
    """
    path, tombstone = check_prefix(prefix) + SUFFIX, prefix + TOMBSTONE
    ancestries = None if force else ancestries or AncestryCache()
    has_manifest = file_exists(storage, path)
    if not has_manifest and not file_exists(storage, tombstone):
        raise missing_checkpoint(storage, prefix)
    try:
        if has_manifest:
            save_id = "" if ancestries is None else _require_unneeded(storage, prefix, ancestries)
            storage.move(path, tombstone)
            if save_id and save_id != _save_id_of(storage.read(tombstone, MANIFEST_BYTES_MAX), tombstone):
                # It was deleted meanwhile, and this is a later save of the name.
                storage.move(tombstone, path)
                return
        finish_deletion(storage, prefix, ancestries)
    except CheckpointException as error:
        # Another process deletes it at the same time.
        if error.code != MISSING:
            raise


def delete_save(
    storage: Storage, prefix: str, save_id: str, ancestries: AncestryCache | None = None, *, job: str | None = None
) -> bool:
    """Delete all files of one save, finished or not; returns false if it is being read on this host.

    Those of other saves of the name stay, and with `job` those of other jobs. Refuses if other checkpoints use its
    files: `checkpoint_needed`.
    """
    ancestries = ancestries or AncestryCache()

    def is_meant(manifest: Manifest | None) -> bool:
        return manifest is not None and manifest.save_id == save_id and job in {None, manifest.job}

    tombstone, manifest = manifest_in(storage, prefix + TOMBSTONE), manifest_in(storage, prefix + SUFFIX)
    for one in (tombstone, manifest):
        if one is not None and one.save_id == save_id and not is_meant(one):
            return True
    if is_meant(manifest) and is_held(storage, prefix + SUFFIX):
        return False
    if is_meant(tombstone) or is_meant(manifest):
        delete(storage, prefix, ancestries)
    # What an unfinished save has left.
    left = [entry.name for entry in save_files(storage, prefix) if entry.name.startswith(f"{prefix}/{save_id}.")]
    if left and (users := ancestries.users_of(storage, prefix, save_id)):
        # Its manifest was deleted by hand.
        raise needed(prefix, users)
    storage.delete(left)
    if left and is_meant(manifest_in(storage, prefix + SUFFIX)):
        # Its writer has published it meanwhile, and names these files.
        delete(storage, prefix, ancestries)
    return True


def manifest_in(storage: Storage, name: str) -> Manifest | None:
    """The manifest or tombstone in a file; None if there is no such file."""
    try:
        data = storage.read(name, MANIFEST_BYTES_MAX)
    except CheckpointException as error:
        if error.code != MISSING:
            raise
        return None
    return decode(data, name)


def _require_unneeded(storage: Storage, prefix: str, ancestries: AncestryCache) -> str:
    """Refuse if other checkpoints use its files. Returns the id of the save; empty if it cannot be read."""
    own = ancestries.all(storage).get(prefix)
    save_id = "" if own is None else own.save_id
    users = ancestries.users_of(storage, prefix, save_id)
    if users:
        raise needed(prefix, users)
    return save_id


def _save_id_of(data: bytes, path: str) -> str:
    """The save that a manifest describes; empty if it cannot be read."""
    try:
        return decode_ancestry(data, path).save_id
    except CheckpointException:
        return ""


def finish_deletion(storage: Storage, prefix: str, ancestries: AncestryCache | None = None) -> None:
    """Delete the files of a tombstone, and then the tombstone; with `ancestries`, only if no checkpoint uses them."""
    path, tombstone = prefix + SUFFIX, prefix + TOMBSTONE
    data = storage.read(tombstone, MANIFEST_BYTES_MAX)
    # Its writer may have died before it was durable; the manifest would come back without its files.
    storage.sync_names([tombstone])
    if ancestries is not None:
        # A save may have published a manifest meanwhile; after that it looks for the tombstone.
        users = ancestries.users_of(storage, prefix, _save_id_of(data, tombstone))
        if users:
            storage.move(tombstone, path)
            raise needed(prefix, users)
    try:
        manifest = decode(data, tombstone)
        # Files of this save that its manifest does not name have names with its save id.
        own = [entry.name for entry in save_files(storage, prefix) if _is_of_save(entry.name, manifest)]
        for name, size in manifest.extra_files.items():
            # A later save may replace the index, so it is checked just before it is deleted.
            if _names_files_of(storage, name, size, manifest):
                storage.delete([name])
        storage.delete({*(part.file for part in manifest.own_parts), *own})
    except CheckpointException as error:
        if error.type not in {ExceptionType.CORRUPTED_CHECKPOINT, ExceptionType.INCOMPATIBLE_VERSION}:
            raise
        # An unreadable tombstone names no files, so all files of saves under the prefix are deleted.
        storage.delete([entry.name for entry in save_files(storage, prefix)])
    if file_exists(storage, path) and _is_same_save(storage.read(path, MANIFEST_BYTES_MAX), data, path):
        # A storage that renames by copying was interrupted before it deleted the source, or the checkpoint was made
        # full at the same time.
        storage.delete([path])
    # The tombstone may belong to a later checkpoint by now, so it is checked just before it is deleted. It is deleted
    # also if it is missing, because the process that removed it may have died before the removal was durable.
    if _read_small(storage, tombstone, MANIFEST_BYTES_MAX) in {data, None}:
        storage.delete([tombstone])


def _is_same_save(data: bytes, other: bytes, path: str) -> bool:
    """Whether two manifests, the second of them a tombstone, are of the same save."""
    save_id = _save_id_of(data, path)
    return data == other or (bool(save_id) and save_id == _save_id_of(other, path))


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
        if not file_exists(storage, index):
            return True
        # It was created between the two reads.
    return False


def delete_unfinished(storage: Storage, prefix: str) -> list[str]:
    """Delete the files of unfinished saves and compactions under a prefix. None may be in progress there."""
    names = [entry.name for entry in unfinished_files(storage, prefix)]
    storage.delete(names)
    return names


def unfinished_files(storage: Storage, prefix: str) -> list[StoredFile]:
    """The files of unfinished saves under a prefix; of a checkpoint, those of interrupted compactions."""
    entries = save_files(storage, prefix)
    if not checkpoint_exists(storage, prefix):
        return entries
    return _unnamed(storage, prefix, [entry for entry in entries if _is_compacted(entry.name)])


def _is_compacted(name: str) -> bool:
    return _COMPACTED_FILE.fullmatch(name.rpartition("/")[2]) is not None


def _unnamed(storage: Storage, prefix: str, entries: list[StoredFile]) -> list[StoredFile]:
    """Those of a checkpoint's files that its manifest does not name; none if it cannot be read."""
    if not entries:
        return []
    try:
        named = set(files_of(read_manifest(storage, prefix)))
    except CheckpointException as error:
        if error.code != "checkpoint_missing" and error.type is not ExceptionType.CORRUPTED_CHECKPOINT:
            raise
        return []
    return [entry for entry in entries if entry.name not in named]


def require_free(storage: Storage, prefix: str) -> None:
    """Refuse a prefix that is taken."""
    path = prefix + SUFFIX
    if file_exists(storage, prefix + TOMBSTONE):
        raise CheckpointException(
            f"{prefix} is being deleted from {storage.url}",
            prefix,
            ExceptionType.SAVE_FAILED,
            code="checkpoint_being_deleted",
            fix=f"`forgectl ckpt rm {prefix}` finishes a deletion that was interrupted",
            retryable=True,
        )
    if file_exists(storage, path):
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
    """The files of saves and compactions that no manifest names, by prefix: failed, or still in progress."""
    names = {entry.name: entry for entry in storage.entries()}
    found: dict[str, list[StoredFile]] = {}
    of_checkpoints: dict[str, list[StoredFile]] = {}
    for name, entry in names.items():
        prefix, _, file = name.rpartition("/")
        if not prefix or prefix + TOMBSTONE in names or not _SAVE_FILE.fullmatch(file):
            continue
        if prefix + SUFFIX not in names:
            found.setdefault(prefix, []).append(entry)
        elif _is_compacted(file):
            of_checkpoints.setdefault(prefix, []).append(entry)
    for prefix, entries in of_checkpoints.items():
        if unnamed := _unnamed(storage, prefix, entries):
            found[prefix] = unnamed
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


def file_exists(storage: Storage, name: str) -> bool:
    """Whether a storage has a file of this name."""
    try:
        with storage.open(name):
            return True
    except CheckpointException as error:
        if error.code != MISSING:
            raise
        return False
