"""Checkpoints in another format, and from and to the files of other tools.

Law: what is converted was verified when it was read, and lies where it is asked for as a whole or not at all; nothing
that was there before is touched. Only blocks of it are in memory, and what is compressed of a file of moderate size.
What a format cannot hold is told.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from forged.checkpoint.errors import CheckpointException, invalid
from forged.checkpoint.export.foreign import INDEX, NPZ, SAFETENSORS, Foreign, opened_index, opened_safetensors
from forged.checkpoint.export.npz import Archive, opened_npz
from forged.checkpoint.format.boxes import Box
from forged.checkpoint.format.consolidated import FILE_BYTES_MAX, FILE_METADATA, File, single_file_of
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import SUFFIX, Manifest, Part, Tensors, decode, encode
from forged.checkpoint.format.names import check_name
from forged.checkpoint.format.states import States
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, RepairedChunk
from forged.checkpoint.ports import CancelToken, Source, Storage, bounded
from forged.checkpoint.saving import parts
from forged.checkpoint.saving.assembly import Array, Assembly, SavedTensors, TensorSource
from forged.checkpoint.saving.consolidation import (
    NamedShare,
    planned_files,
    publish_indexes,
    withdraw_indexes,
    write_indexes,
    write_share,
)
from forged.checkpoint.saving.image import layout_of
from forged.checkpoint.saving.plan import Share
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.locations import root_at, storage_at

Where = str | os.PathLike[str]
Tell = Callable[[int, int], object]
EXISTS = "checkpoint_exists"
UNDONE_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Converted:
    """What came of it."""

    tensors: int
    size_bytes: int
    left_out: tuple[str, ...]
    """Values that are no arrays, where they could not be kept."""
    repaired: tuple[RepairedChunk, ...]
    """Where a healthy copy was read in the place of a bad chunk."""


@dataclass(frozen=True, slots=True)
class How:
    """How it is to be done."""

    format: CheckpointFormat | None = None
    """That of the source without one; of files of other tools a single one."""
    compression: CompressionLevel = CompressionLevel.NONE
    file_bytes_max: int = FILE_BYTES_MAX
    """How large a file of whole tensors may get before another one is begun."""
    tell: Tell | None = None
    """Called now and then with how many bytes were taken over, and of how many."""
    wall: Callable[[], float] = time.time
    draw: Callable[[int], bytes] = os.urandom


def convert(source: Where, target: Where, how: How | None = None, token: CancelToken | None = None) -> Converted:
    """Make `target` of `source`.

    Both are paths or URLs: of a checkpoint, of a `.safetensors` file or an `.npz` archive. A source may be the index of
    several safetensors files, or the directory that has it, too.
    """
    how, token = how or How(), token or CancelToken()
    ending = _ending_of(target)
    if ending and how.compression is not CompressionLevel.NONE:
        raise invalid(f"{os.fspath(target)} cannot be compressed", "compress checkpoints alone")
    with _opened(source, token, how.wall) as opened:
        if ending:
            return _write_foreign(opened, target, ending, how, token)
        return _write_checkpoint(opened, target, how, token)


class _Opened(NamedTuple):
    """Something that can be converted."""

    origin: TensorSource
    manifest: Manifest
    """That of the checkpoint, or what would be that of the arrays of a foreign file."""
    is_checkpoint: bool

    @property
    def repaired(self) -> tuple[RepairedChunk, ...]:
        """What was read elsewhere."""
        return tuple(self.origin.repaired) if isinstance(self.origin, SavedTensors) else ()

    def watched(self, how: How, shares: Sequence[Share]) -> _Watched:
        """Where the arrays come from, for somebody who takes these."""
        return _Watched(self.origin, how.tell, sum(_bytes_of(self.manifest.tensors, share) for share in shares))


@contextmanager
def _opened(source: Where, token: CancelToken, wall: Callable[[], float]) -> Iterator[_Opened]:
    text = os.fspath(source)
    if not text.endswith((SAFETENSORS, NPZ, INDEX)):
        storage, prefix = storage_at(source)
        storage = bounded(storage, token)
        if listing.checkpoint_exists(storage, prefix):
            manifest = listing.read_manifest(storage, prefix)
            yield _Opened(SavedTensors(storage, manifest, token), manifest, is_checkpoint=True)
            return
        text = _model_in(text, bounded(root_at(source), token), listing.missing_checkpoint(storage, prefix))
    storage, file = _located(text)
    opening = opened_index if file.endswith(INDEX) else opened_npz if file.endswith(NPZ) else opened_safetensors
    with opening(bounded(storage, token), file, token) as foreign:
        yield _Opened(foreign, _manifest_of(foreign, wall), is_checkpoint=False)


def _model_in(folder: str, storage: Storage, otherwise: CheckpointException) -> str:
    """The model of a directory: its index, or the one file that there is."""
    names = sorted(entry.name for entry in storage.entries() if "/" not in entry.name)
    for ending in (INDEX, SAFETENSORS):
        found = [name for name in names if name.endswith(ending)]
        if len(found) == 1 or f"model{ending}" in found:
            return f"{folder.rstrip('/')}/{found[0] if len(found) == 1 else f'model{ending}'}"
    raise otherwise


def _manifest_of(foreign: Foreign, wall: Callable[[], float]) -> Manifest:
    return Manifest("", wall(), 1, foreign.tensors, States.of([foreign.tree]), [], layout=CheckpointFormat.SINGLE_FILE)


def _located(where: Where) -> tuple[Storage, str]:
    """The storage of the folder, and the file's name there."""
    folder, slash, name = os.fspath(where).rpartition("/")
    return root_at((folder or slash) if slash else "."), check_name(name)


def _ending_of(target: Where) -> str:
    """Of what kind a foreign file is; nothing if it is a checkpoint."""
    text = os.fspath(target)
    if text.endswith(INDEX):
        raise invalid(f"{text} is no target", "convert to a checkpoint of the format consolidated, which has an index")
    return next((ending for ending in (SAFETENSORS, NPZ) if text.endswith(ending)), "")


# To a checkpoint.


def _write_checkpoint(opened: _Opened, target: Where, how: How, token: CancelToken) -> Converted:
    patient, prefix = storage_at(target)
    storage = bounded(patient, token)
    listing.require_free(storage, prefix)
    source = opened.manifest
    layout = how.format or source.layout
    save_id = how.draw(listing.SAVE_ID_BYTES).hex()
    files: list[File] = []
    if layout is CheckpointFormat.MULTI_SHARD:
        shares = _shares(opened, prefix, save_id, how)
    else:
        files = planned_files(source.tensors, prefix, save_id, layout, how.compression, how.file_bytes_max)
        shares = [NamedShare(f"{prefix}/{file.name}", 0, Share(file.tensors, {}), file.names) for file in files]
    origin = opened.watched(how, [share.share for share in shares])
    written: list[Part] = []
    data = b""
    try:
        written.extend(write_share(storage, share, origin, how.compression, token) for share in shares)
        extra = write_indexes(storage, prefix, save_id, files)
        manifest = msgspec.structs.replace(
            source,
            prefix=prefix,
            save_id=save_id,
            parts=written,
            layout=layout,
            compression=how.compression,
            extra_files=extra,
        )
        data = encode(manifest)
        token.check()
        storage.publish(decode(data, manifest.path).path, data)
        publish_indexes(storage, prefix, save_id, files)
    except BaseException as error:
        # Also when the time is over.
        patient = bounded(patient, CancelToken(UNDONE_WITHIN_S))
        _take_back(patient, prefix, data, error)
        patient.delete([part.file for part in written])
        withdraw_indexes(patient, prefix, save_id, files)
        raise
    origin.finish()
    return Converted(len(source.tensors.names), manifest.size_bytes, (), opened.repaired)


def _shares(opened: _Opened, prefix: str, save_id: str, how: How) -> list[NamedShare]:
    """The same parts as the source has, or one of all."""
    source = opened.manifest
    of_ranks = [(part.rank, Share(part.tensors, dict(part.partial_boxes))) for part in source.parts]
    if not opened.is_checkpoint:
        of_ranks = [(0, Share(list(range(len(source.tensors.names))), {}))]
    is_packed = how.compression is not CompressionLevel.NONE
    return [
        NamedShare(listing.part_name(prefix, save_id, number, len(of_ranks), is_packed=is_packed), rank, share, None)
        for number, (rank, share) in enumerate(of_ranks)
    ]


def _take_back(storage: Storage, prefix: str, data: bytes, error: BaseException) -> None:
    """Have no manifest; it may stand although it was not told so."""
    path = prefix + SUFFIX
    has_failed_to_tell = data and not (isinstance(error, CheckpointException) and error.code == EXISTS)
    if has_failed_to_tell and listing.checkpoint_exists(storage, prefix) and storage.read(path, len(data)) == data:
        storage.delete([path])


# To a file of another tool.


def _write_foreign(opened: _Opened, target: Where, ending: str, how: How, token: CancelToken) -> Converted:
    storage, name = _located(target)
    storage = bounded(storage, token)
    tensors = opened.manifest.tensors
    everything = Share(list(range(len(tensors.names))), {})
    source: Source
    if ending == NPZ:
        origin = opened.watched(how, [everything, everything])
        source = Archive(origin, _names_of_their_own(opened.manifest), token)
    else:
        origin = opened.watched(how, [everything])
        names = single_file_of(tensors, name).names
        source = Assembly(layout_of(tensors, everything, FILE_METADATA, names), everything, origin)
    parts.write_durably(storage, name, source, token)
    origin.finish()
    values = opened.manifest.states.values()
    left_out = tuple(sorted({value.name for value in values if value.node != {"v": None}}))
    return Converted(len(tensors.names), source.size, left_out, opened.repaired)


def _names_of_their_own(manifest: Manifest) -> list[str]:
    """The names of the tensors; those of ranks with the rank."""
    ranks = manifest.tensors.ranks
    names = manifest.tensors.names
    return [f"{name}@{ranks[number]}" if number in ranks else name for number, name in enumerate(names)]


def _bytes_of(tensors: Tensors, share: Share) -> int:
    return sum(
        share.box(place, tuple(tensors.shapes[tensor])).volume * dtype_of(tensors.dtypes[tensor]).itemsize
        for place, tensor in enumerate(share.tensors)
    )


class _Watched:
    """An origin, with somebody who is told how much was taken from it."""

    def __init__(self, origin: TensorSource, tell: Tell | None, total: int) -> None:
        self._origin = origin
        self._tell = tell
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    @property
    def tensors(self) -> Tensors:
        return self._origin.tensors

    def fetch(self, wanted: Sequence[int], boxes: Mapping[int, Box], rooms: Mapping[int, Array]) -> None:
        self._origin.fetch(wanted, boxes, rooms)
        self._count(sum(room.nbytes for room in rooms.values()))

    def finish(self) -> None:
        """All that was wanted was taken."""
        self._count(self._total)

    def _count(self, size: int) -> None:
        with self._lock:
            # What was forgotten meanwhile is taken again.
            self._done = min(self._total, self._done + size)
            if self._tell is not None:
                self._tell(self._done, self._total)
