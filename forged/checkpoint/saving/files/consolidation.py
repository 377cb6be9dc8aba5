"""Writes files of whole tensors, and the indexes that other tools read.

Invariants:
- Tensors that come from a checkpoint are verified as they are read.
- A file that could not be finished is deleted.
- An index is replaced atomically, and deleted only by the save that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.format.consolidated import (
    FILE_BYTES_MAX,
    FILE_METADATA,
    ConsolidatedFile,
    files_of,
    indexes_of,
    single_file_of,
)
from forged.checkpoint.format.manifest import Part, Tensors
from forged.checkpoint.model import CheckpointFormat, CompressionLevel
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.saving.files import parts
from forged.checkpoint.saving.files.assembly import Assembly, TensorSource
from forged.checkpoint.saving.files.image import layout_of
from forged.checkpoint.saving.files.plan import Share
from forged.checkpoint.storage import listing

KEPT_BYTES_MAX = 1 << 30
"""Compressed files up to this size are kept in memory; larger ones are compressed twice."""


def planned_files(
    tensors: Tensors,
    prefix: str,
    save_id: str,
    layout: CheckpointFormat,
    level: CompressionLevel,
    file_bytes_max: int = FILE_BYTES_MAX,
) -> list[ConsolidatedFile]:
    """The files of a checkpoint of whole tensors; none without tensors."""
    if not tensors.names:
        return []
    is_packed = level is not CompressionLevel.NONE
    if layout is CheckpointFormat.CONSOLIDATED:
        return files_of(tensors, save_id, is_packed=is_packed, file_bytes_max=file_bytes_max)
    if layout is CheckpointFormat.SINGLE_FILE:
        name = listing.part_name(prefix, save_id, 0, 1, is_packed=is_packed)
        return [single_file_of(tensors, name.removeprefix(f"{prefix}/"))]
    raise invalid(f"whole tensors cannot be saved in the format {layout}", "use single_file or consolidated")


class NamedShare(NamedTuple):
    """The contents of a file."""

    file: str
    rank: int
    """The rank that the manifest names as the writer."""
    share: Share
    names: Sequence[str] | None
    """The tensors' names in the file; None: as in the manifest."""


def write_file(
    storage: Storage,
    prefix: str,
    file: ConsolidatedFile,
    origin: TensorSource,
    level: CompressionLevel,
    rank: int,
    token: CancelToken,
) -> Part:
    """Write one file of whole tensors durably."""
    named = NamedShare(f"{prefix}/{file.name}", rank, Share(file.tensors, {}), file.names)
    return write_share(storage, named, origin, level, token)


def write_share(
    storage: Storage, named: NamedShare, origin: TensorSource, level: CompressionLevel, token: CancelToken
) -> Part:
    """Write one file durably."""
    file, rank, share, names = named
    metadata = parts.FILE_METADATA if names is None else FILE_METADATA
    assembly = Assembly(layout_of(origin.tensors, share, metadata, names), share, origin)
    if level is CompressionLevel.NONE:
        return parts.write_uncompressed(storage, file, rank, share, assembly, assembly, token)
    packed = parts.CompressedPart(assembly, None, level, token, keeps=assembly.size <= KEPT_BYTES_MAX)
    return parts.write_compressed(storage, file, rank, share, packed, token)


def write_indexes(storage: Storage, prefix: str, save_id: str, files: Sequence[ConsolidatedFile]) -> dict[str, int]:
    """Write the indexes under temporary names, for `publish_indexes`; return their final names and sizes."""
    documents = {_index_names(prefix, save_id, name): data for name, data in indexes_of(files).items()}
    for _, shown in documents:
        _require_ours(storage, shown)
    try:
        for (own, _), data in documents.items():
            storage.publish(own, data)
    except BaseException:
        storage.delete([own for own, _ in documents])
        raise
    return {shown: len(data) for (_, shown), data in documents.items()}


def publish_indexes(storage: Storage, prefix: str, save_id: str, files: Sequence[ConsolidatedFile]) -> None:
    """Give the indexes their final names, over those that another save has left there.

    Call it after the manifest is published: then no other save uses the prefix.
    """
    for name in indexes_of(files):
        storage.move(*_index_names(prefix, save_id, name))


def withdraw_indexes(storage: Storage, prefix: str, save_id: str, files: Sequence[ConsolidatedFile]) -> None:
    """Delete the indexes of these files, but not an index that another save has put in their place."""
    doomed = []
    for name, data in indexes_of(files).items():
        own, shown = _index_names(prefix, save_id, name)
        doomed += [own, shown] if listing.has_content(storage, shown, data) else [own]
    storage.delete(doomed)


def _require_ours(storage: Storage, shown: str) -> None:
    """Refuse to replace an index that was not written by a save."""
    if not listing.is_replaceable_index(storage, shown):
        raise CheckpointException(
            f"{shown} in {storage.url} is an index that forged has not written",
            shown,
            ExceptionType.SAVE_FAILED,
            code="checkpoint_index_foreign",
            fix="use another prefix, or move that index away",
        )


def _index_names(prefix: str, save_id: str, name: str) -> tuple[str, str]:
    """An index's temporary name and its final one."""
    return f"{prefix}/{save_id}.{name}", f"{prefix}/{name}"
