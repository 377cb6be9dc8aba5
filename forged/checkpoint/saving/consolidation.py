"""Files of whole tensors, made from the parts of a checkpoint.

Law: what is written was verified when it was read. Whoever works out who makes which file comes to the same result, so
ranks share the work without talking about it. A file that does not come to its end is not there. An index replaces what
stood there as a whole, and is taken away only by whose it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.format.consolidated import (
    FILE_BYTES_MAX,
    FILE_METADATA,
    File,
    files_of,
    indexes_of,
    single_file_of,
)
from forged.checkpoint.format.manifest import Manifest, Part, Tensors
from forged.checkpoint.model import CheckpointFormat, CompressionLevel
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.saving import parts
from forged.checkpoint.saving.assembly import Assembly, SavedTensors, TensorSource
from forged.checkpoint.saving.image import layout_of
from forged.checkpoint.saving.plan import Share
from forged.checkpoint.storage import listing

KEPT_BYTES_MAX = 1 << 30
"""A larger file is compressed twice rather than kept in memory."""


def planned_files(
    tensors: Tensors,
    prefix: str,
    save_id: str,
    layout: CheckpointFormat,
    level: CompressionLevel,
    file_bytes_max: int = FILE_BYTES_MAX,
) -> list[File]:
    """The files that a checkpoint of whole tensors has; none where there are no tensors."""
    if not tensors.names:
        return []
    is_packed = level is not CompressionLevel.NONE
    if layout is CheckpointFormat.CONSOLIDATED:
        return files_of(tensors, save_id, is_packed=is_packed, file_bytes_max=file_bytes_max)
    if layout is CheckpointFormat.SINGLE_FILE:
        name = listing.part_name(prefix, save_id, 0, 1, is_packed=is_packed)
        return [single_file_of(tensors, name.removeprefix(f"{prefix}/"))]
    raise invalid(f"{layout} has no files of whole tensors", "use single_file or consolidated")


def share_of(files: Sequence[File], rank: int, world_size: int) -> list[File]:
    """Which of the files a rank makes: the largest that are left go to whoever has the least to do."""
    loads = [0] * world_size
    mine = []
    for file in sorted(files, key=lambda one: (-one.size, one.name)):
        least = loads.index(min(loads))
        loads[least] += file.size
        if least == rank:
            mine.append(file)
    return sorted(mine, key=lambda one: one.name)


def consolidate(
    storage: Storage,
    source: Manifest,
    files: Sequence[File],
    level: CompressionLevel,
    rank: int,
    token: CancelToken,
) -> list[Part]:
    """Make files from the parts that `source` names, under its prefix; durable when it returns.

    `source` need not be published. Blocks are read, verified, hashed and written one after the other.
    """
    origin = SavedTensors(storage, source, token)
    written: list[Part] = []
    try:
        written.extend(write_file(storage, source.prefix, file, origin, level, rank, token) for file in files)
    except BaseException:
        storage.delete([part.file for part in written])
        raise
    return written


class NamedShare(NamedTuple):
    """What becomes a file."""

    file: str
    rank: int
    """Who is said to have written it."""
    share: Share
    names: Sequence[str] | None
    """What its tensors are called there; as in the manifest without any."""


def write_file(
    storage: Storage,
    prefix: str,
    file: File,
    origin: TensorSource,
    level: CompressionLevel,
    rank: int,
    token: CancelToken,
) -> Part:
    """Make one file of whole tensors; durable when it returns."""
    named = NamedShare(f"{prefix}/{file.name}", rank, Share(file.tensors, {}), file.names)
    return write_share(storage, named, origin, level, token)


def write_share(
    storage: Storage, named: NamedShare, origin: TensorSource, level: CompressionLevel, token: CancelToken
) -> Part:
    """Make one file; durable when it returns."""
    file, rank, share, names = named
    metadata = parts.FILE_METADATA if names is None else FILE_METADATA
    assembly = Assembly(layout_of(origin.tensors, share, metadata, names), share, origin)
    if level is CompressionLevel.NONE:
        return parts.write_uncompressed(storage, file, rank, share, assembly, assembly, token)
    packed = parts.CompressedPart(assembly, None, level, token, keeps=assembly.size <= KEPT_BYTES_MAX)
    return parts.write_compressed(storage, file, rank, share, packed, token)


def write_indexes(storage: Storage, prefix: str, save_id: str, files: Sequence[File]) -> dict[str, int]:
    """Write the documents that tell other tools which tensor is where, for `publish_indexes`.

    Returned is what they are going to be called, with their sizes, for the manifest.
    """
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


def publish_indexes(storage: Storage, prefix: str, save_id: str, files: Sequence[File]) -> None:
    """Put the indexes where other tools look for them; what another save has left there is replaced.

    Only of a save whose manifest stands, so that no other one is at it.
    """
    for name in indexes_of(files):
        storage.move(*_index_names(prefix, save_id, name))


def withdraw_indexes(storage: Storage, prefix: str, save_id: str, files: Sequence[File]) -> None:
    """Have the indexes of these files no more; what another save has put in their place stays."""
    doomed = []
    for name, data in indexes_of(files).items():
        own, shown = _index_names(prefix, save_id, name)
        doomed += [own, shown] if listing.has_content(storage, shown, data) else [own]
    storage.delete(doomed)


def _require_ours(storage: Storage, shown: str) -> None:
    """Refuse to replace an index that no save has put there."""
    if not listing.is_replaceable_index(storage, shown):
        raise CheckpointException(
            f"{shown} in {storage.url} is the index of a model from elsewhere",
            shown,
            ExceptionType.SAVE_FAILED,
            code="checkpoint_index_foreign",
            fix="give the checkpoint another name, or move that model away",
        )


def _index_names(prefix: str, save_id: str, name: str) -> tuple[str, str]:
    """Under which name an index is written, and under which one other tools look for it."""
    return f"{prefix}/{save_id}.{name}", f"{prefix}/{name}"
