"""Conversion of checkpoints to other layouts, and to and from the files of other tools.

Invariants:
- What is converted is verified when it is read.
- The target appears as a whole or not at all; existing files are never replaced.
- Memory is bounded by blocks; compressed arrays of an `.npz` archive go through a temporary file.
- Values that the target format cannot hold are reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from forged.checkpoint.errors import CheckpointException, invalid
from forged.checkpoint.export.external_files import INDEX, NPZ, SAFETENSORS, FileArrays, open_index, open_safetensors
from forged.checkpoint.export.npz import Archive, open_npz
from forged.checkpoint.export.torch_directories import is_torch_directory, open_torch_directory, write_torch_directory
from forged.checkpoint.export.torch_files import ENDINGS, open_torch_file, stored_state, torch_file
from forged.checkpoint.format.consolidated import FILE_BYTES_MAX, FILE_METADATA, ConsolidatedFile, single_file_of
from forged.checkpoint.format.manifest import SUFFIX, VERSION, Manifest, Part, decode, encode
from forged.checkpoint.format.names import check_name
from forged.checkpoint.format.states import States
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, RepairedChunk
from forged.checkpoint.ports import ByteSource, CancelToken, Storage, bounded
from forged.checkpoint.progress import Progress
from forged.checkpoint.saving.files import parts
from forged.checkpoint.saving.files.assembly import Assembly, CountedTensors, SavedTensors, TensorSource, bytes_of_share
from forged.checkpoint.saving.files.consolidation import (
    NamedShare,
    planned_files,
    publish_indexes,
    withdraw_indexes,
    write_indexes,
    write_share,
)
from forged.checkpoint.saving.files.image import layout_of
from forged.checkpoint.saving.files.plan import Share
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.locations import root_at, storage_at

Where = str | os.PathLike[str]
EXISTS = "checkpoint_exists"
UNDONE_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion."""

    tensors: int
    size_bytes: int
    left_out: tuple[str, ...]
    """Values that are not arrays, where the target cannot hold them."""
    repaired: tuple[RepairedChunk, ...]
    """Corrupt chunks that were read from a healthy copy."""


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """How to convert."""

    format: CheckpointFormat | None = None
    """Default: the source's format; `single_file` for files of other tools."""
    compression: CompressionLevel = CompressionLevel.NONE
    is_torch_directory: bool = False
    """Whether the target is a directory of `torch.distributed.checkpoint`."""
    file_bytes_max: int = FILE_BYTES_MAX
    """The size at which a consolidated layout begins another file."""
    progress: Progress | None = None
    """Called with the bytes converted and the total."""
    wall: Callable[[], float] = time.time
    draw: Callable[[int], bytes] = os.urandom


def convert(
    source: Where, target: Where, options: ConversionOptions | None = None, token: CancelToken | None = None
) -> Converted:
    """Convert `source` to `target`.

    Both are paths or URLs of a checkpoint, a `.safetensors` file, an `.npz` archive, a `.pt` or `.pth` file of torch,
    or a directory of `torch.distributed.checkpoint` (a target with `is_torch_directory`). A source may also be the
    index of several safetensors files, or the directory that contains it. No class that a file names is used.
    """
    options, token = options or ConversionOptions(), token or CancelToken()
    ending = _ending_of(target)
    if options.is_torch_directory and (ending or options.format is not None):
        raise invalid("a directory of torch.distributed.checkpoint has no other format", "give a new directory")
    if (ending or options.is_torch_directory) and options.compression is not CompressionLevel.NONE:
        raise invalid(f"{os.fspath(target)} cannot be compressed", "compression works for checkpoints only")
    with _open_source(source, token, options.wall) as opened:
        if options.is_torch_directory:
            return _write_torch_directory(opened, target, options, token)
        if ending in ENDINGS:
            return _write_torch_file(opened, target, options, token)
        if ending:
            return _write_file(opened, target, ending, options, token)
        return _write_checkpoint(opened, target, options, token)


class _Source(NamedTuple):
    """The opened source of a conversion."""

    origin: TensorSource
    manifest: Manifest
    """The checkpoint's manifest, or one made for the arrays of a file."""
    is_checkpoint: bool

    @property
    def repaired(self) -> tuple[RepairedChunk, ...]:
        """Chunks that were read from a healthy copy."""
        return tuple(self.origin.repaired) if isinstance(self.origin, SavedTensors) else ()

    def counted(self, options: ConversionOptions, shares: Sequence[Share]) -> CountedTensors:
        """The source's tensors, with progress over these shares."""
        total = sum(bytes_of_share(self.manifest.tensors, share) for share in shares)
        return CountedTensors(self.origin, options.progress, total)


@contextmanager
def _open_source(source: Where, token: CancelToken, wall: Callable[[], float]) -> Iterator[_Source]:
    text = os.fspath(source)
    if not text.endswith((SAFETENSORS, NPZ, INDEX, *ENDINGS)):
        folder = bounded(root_at(source), token)
        if is_torch_directory(folder):
            with open_torch_directory(folder, token) as arrays:
                yield _Source(arrays, _manifest_of(arrays, wall), is_checkpoint=False)
            return
        storage, prefix = storage_at(source)
        storage = bounded(storage, token)
        if listing.checkpoint_exists(storage, prefix):
            manifest = listing.read_manifest(storage, prefix)
            yield _Source(SavedTensors(storage, manifest, token), manifest, is_checkpoint=True)
            return
        text = _model_in(text, folder, listing.missing_checkpoint(storage, prefix))
    storage, file = _file_at(text)
    opening = open_torch_file if file.endswith(ENDINGS) else open_safetensors
    opening = open_index if file.endswith(INDEX) else open_npz if file.endswith(NPZ) else opening
    with opening(bounded(storage, token), file, token) as arrays:
        yield _Source(arrays, _manifest_of(arrays, wall), is_checkpoint=False)


def _model_in(folder: str, storage: Storage, otherwise: CheckpointException) -> str:
    """The model in a directory: its index, or its only safetensors file."""
    names = sorted(entry.name for entry in storage.entries() if "/" not in entry.name)
    for ending in (INDEX, SAFETENSORS):
        found = [name for name in names if name.endswith(ending)]
        if len(found) == 1 or f"model{ending}" in found:
            return f"{folder.rstrip('/')}/{found[0] if len(found) == 1 else f'model{ending}'}"
    raise otherwise


def _manifest_of(arrays: FileArrays, wall: Callable[[], float]) -> Manifest:
    return Manifest("", wall(), 1, arrays.tensors, States.of([arrays.tree]), [], layout=CheckpointFormat.SINGLE_FILE)


def _file_at(where: Where) -> tuple[Storage, str]:
    """The storage of the file's folder, and the file's name there."""
    folder, slash, name = os.fspath(where).rpartition("/")
    return root_at((folder or slash) if slash else "."), check_name(name)


def _ending_of(target: Where) -> str:
    """The ending of a file of another tool; empty for a checkpoint."""
    text = os.fspath(target)
    if text.endswith(INDEX):
        raise invalid(f"{text} cannot be a target", "convert to a checkpoint of format consolidated; it has an index")
    return next((ending for ending in (SAFETENSORS, NPZ, *ENDINGS) if text.endswith(ending)), "")


# To a checkpoint.


def _write_checkpoint(opened: _Source, target: Where, options: ConversionOptions, token: CancelToken) -> Converted:
    unbounded, prefix = storage_at(target)
    storage = bounded(unbounded, token)
    listing.require_free(storage, prefix)
    source = opened.manifest
    layout = options.format or source.layout
    save_id = options.draw(listing.SAVE_ID_BYTES).hex()
    files: list[ConsolidatedFile] = []
    if layout is CheckpointFormat.MULTI_SHARD:
        shares = _shares(opened, prefix, save_id, options)
    else:
        files = planned_files(source.tensors, prefix, save_id, layout, options.compression, options.file_bytes_max)
        shares = [NamedShare(f"{prefix}/{file.name}", 0, Share(file.tensors, {}), file.names) for file in files]
    origin = opened.counted(options, [share.share for share in shares])
    written: list[Part] = []
    data = b""
    try:
        written.extend(write_share(storage, share, origin, options.compression, token) for share in shares)
        extra = write_indexes(storage, prefix, save_id, files)
        manifest = msgspec.structs.replace(
            source,
            version=VERSION,
            chain=msgspec.UNSET,
            prefix=prefix,
            save_id=save_id,
            parts=written,
            layout=layout,
            compression=options.compression,
            extra_files=extra,
        )
        data = encode(manifest)
        token.check()
        storage.publish(decode(data, manifest.path).path, data)
        publish_indexes(storage, prefix, save_id, files)
    except BaseException as error:
        # A token of its own, because the operation's time may be over.
        unbounded = bounded(unbounded, CancelToken(UNDONE_WITHIN_S))
        _delete_own_manifest(unbounded, prefix, data, error)
        unbounded.delete([part.file for part in written])
        withdraw_indexes(unbounded, prefix, save_id, files)
        raise
    origin.finish()
    return Converted(len(source.tensors.names), manifest.size_bytes, (), opened.repaired)


def _shares(opened: _Source, prefix: str, save_id: str, options: ConversionOptions) -> list[NamedShare]:
    """The parts to write: those of the source; for an incremental checkpoint or a file, one with everything."""
    source = opened.manifest
    of_ranks = [(part.rank, Share(part.tensors, dict(part.partial_boxes))) for part in source.parts]
    if not opened.is_checkpoint or source.links:
        of_ranks = [(0, Share(list(range(len(source.tensors.names))), {}))]
    is_packed = options.compression is not CompressionLevel.NONE
    return [
        NamedShare(listing.part_name(prefix, save_id, number, len(of_ranks), is_packed=is_packed), rank, share, None)
        for number, (rank, share) in enumerate(of_ranks)
    ]


def _delete_own_manifest(storage: Storage, prefix: str, data: bytes, error: BaseException) -> None:
    """Delete the manifest if it was published although publishing raised an error."""
    path = prefix + SUFFIX
    has_failed_to_tell = data and not (isinstance(error, CheckpointException) and error.code == EXISTS)
    if has_failed_to_tell and listing.checkpoint_exists(storage, prefix) and storage.read(path, len(data)) == data:
        storage.delete([path])


# To a file of another tool.


def _write_file(
    opened: _Source, target: Where, ending: str, options: ConversionOptions, token: CancelToken
) -> Converted:
    storage, name = _file_at(target)
    storage = bounded(storage, token)
    tensors = opened.manifest.tensors
    everything = Share(list(range(len(tensors.names))), {})
    source: ByteSource
    if ending == NPZ:
        origin = opened.counted(options, [everything, everything])
        source = Archive(origin, _unique_names(opened.manifest), token)
    else:
        origin = opened.counted(options, [everything])
        names = single_file_of(tensors, name).names
        source = Assembly(layout_of(tensors, everything, FILE_METADATA, names), everything, origin)
    parts.write_durably(storage, name, source, token)
    origin.finish()
    values = opened.manifest.states.values()
    left_out = tuple(sorted({value.name for value in values if value.node != {"v": None}}))
    return Converted(len(tensors.names), source.size, left_out, opened.repaired)


def _write_torch_file(opened: _Source, target: Where, options: ConversionOptions, token: CancelToken) -> Converted:
    storage, name = _file_at(target)
    state = stored_state(opened.manifest)
    written = Share(state.numbers, {})
    origin = opened.counted(options, [written, written])
    source = torch_file(origin, state, token)
    parts.write_durably(bounded(storage, token), name, source, token)
    origin.finish()
    return Converted(len(state.numbers), source.size, tuple(sorted(state.left_out)), opened.repaired)


def _write_torch_directory(opened: _Source, target: Where, options: ConversionOptions, token: CancelToken) -> Converted:
    state = stored_state(opened.manifest)
    written = Share(state.numbers, {})
    origin = opened.counted(options, [written, written])
    size = write_torch_directory(bounded(root_at(target), token), origin, state, token)
    origin.finish()
    return Converted(len(state.numbers), size, tuple(sorted(state.left_out)), opened.repaired)


def _unique_names(manifest: Manifest) -> list[str]:
    """The names of the tensors; per-rank ones with their rank."""
    ranks = manifest.tensors.ranks
    names = manifest.tensors.names
    return [f"{name}@{ranks[number]}" if number in ranks else name for number, name in enumerate(names)]
