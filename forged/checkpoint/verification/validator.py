"""Whether a checkpoint is what was saved.

Law: nothing is changed and nothing is taken for granted: the manifest is checked by its own checksum, everything else
by the manifest. Whatever is found is a finding that says where, and so is what cannot be read. Memory is bounded by the
blocks that are being read.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Protocol

import numpy as np
import xxhash

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.dtypes import dtype_of, safetensors_name
from forged.checkpoint.format.manifest import SUFFIX, VERSION, Manifest, Part
from forged.checkpoint.format.safetensors import read_header
from forged.checkpoint.loading.fetching import (
    BufferPool,
    corrupt_chunk,
    decompress_chunk,
    is_storage_failure,
    unreadable_chunk,
)
from forged.checkpoint.loading.read_plan import Index, PartLayout, blocks_of, plan
from forged.checkpoint.model import check_timeout
from forged.checkpoint.ports import CancelToken, Reader, Storage, bounded
from forged.checkpoint.storage.listing import read_manifest
from forged.checkpoint.thread_pool import THREADS, run_all
from forged.errors import describe

FINDINGS_MAX = 200
"""After so many it is known well enough."""
SHOWN_MAX = 20
FILES = "files"

Progress = Callable[[int, int], object]
"""Told how many bytes were checked, and how many there are; called by several threads, one at a time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be."""

    message: str
    code: str = "checkpoint_invalid"
    is_error: bool = True
    """Else a warning: the checkpoint can be loaded all the same."""
    tensor: str | None = None
    rank: int | None = None
    file: str | None = None
    chunk: int | None = None
    """The number of the chunk in its piece of the tensor."""
    type: ExceptionType = ExceptionType.VALIDATION_FAILED
    """What kind of trouble it is to who wants to load it."""


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """What a check has found."""

    name: str
    """What was checked."""
    findings: tuple[Finding, ...] = ()
    sub_results: tuple[ValidationResult, ...] = ()
    bytes_checked: int = 0
    """How much was read and compared with its hash."""
    manifest: Manifest | None = None
    """That of the checkpoint, if it can be read."""

    @property
    def errors(self) -> list[Finding]:
        """What makes it invalid."""
        return [finding for finding in self._all() if finding.is_error]

    @property
    def warnings(self) -> list[Finding]:
        """What does not."""
        return [finding for finding in self._all() if not finding.is_error]

    @property
    def is_valid(self) -> bool:
        """Whether it can be loaded."""
        return not self.errors

    @property
    def has_warnings(self) -> bool:
        """Whether there is something to say."""
        return bool(self.warnings)

    def get_summary(self) -> str:
        """It in words, a line for each finding."""
        verdict = "valid" if self.is_valid else "invalid"
        checks = ", ".join(f"{one.name} {'ok' if one.is_valid else 'failed'}" for one in self.sub_results)
        lines = [f"{self.name} is {verdict}" + (f": {checks}" if checks else "")]
        found = [*self.errors, *self.warnings]
        lines += [f"  {'error' if one.is_error else 'warning'}: {one.message}" for one in found[:SHOWN_MAX]]
        if len(found) > SHOWN_MAX:
            lines.append(f"  and {len(found) - SHOWN_MAX} more")
        return "\n".join(lines)

    def require_valid(self, prefix: str) -> None:
        """Raise what was found, if it is an error."""
        errors = self.errors
        if errors:
            codes, types = {finding.code for finding in errors}, {finding.type for finding in errors}
            raise CheckpointException(
                f"the checkpoint {prefix} cannot be loaded:\n{self.get_summary()}",
                prefix,
                errors[0].type if len(types) == 1 else ExceptionType.VALIDATION_FAILED,
                code=errors[0].code if len(codes) == 1 else "checkpoint_invalid",
                fix="load another checkpoint, or parts of this one with skip_validation",
            )

    def _all(self) -> Iterator[Finding]:
        yield from self.findings
        for one in self.sub_results:
            yield from one._all()


class IntegrityChecker(Protocol):
    """Looks whether a checkpoint is whole in some way of its own."""

    @property
    def name(self) -> str:
        """What it checks."""
        ...

    def check(self, manifest: Manifest, storage: Storage, token: CancelToken) -> Iterable[Finding]:
        """What it finds."""
        ...


class CompatibilityChecker(IntegrityChecker, Protocol):
    """Looks whether a checkpoint is one for those who want to load it."""


class CheckpointValidator:
    """Checks checkpoints of a storage."""

    def __init__(
        self,
        storage: Storage,
        integrity_checkers: Sequence[IntegrityChecker] = (),
        compatibility_checkers: Sequence[CompatibilityChecker] = (),
        *,
        threads: int = THREADS,
    ) -> None:
        self._storage = storage
        self._checkers = (*integrity_checkers, *compatibility_checkers)
        self._threads = threads

    def validate_checkpoint(
        self, prefix: str, token: CancelToken | None = None, *, deep: bool = True, progress: Progress | None = None
    ) -> ValidationResult:
        """Check a checkpoint; with `deep`, every byte of it."""
        token = token or CancelToken()
        storage = bounded(self._storage, token)
        try:
            manifest = read_manifest(storage, prefix)
        except CheckpointException as error:
            token.check()
            if error.retryable or error.type is ExceptionType.VALIDATION_FAILED:
                raise
            is_other = error.type is ExceptionType.INCOMPATIBLE_VERSION
            kind = error.type if is_other else ExceptionType.VALIDATION_FAILED
            found = Finding(error.message, error.code, file=prefix + SUFFIX, type=kind)
            return ValidationResult(prefix, (), (ValidationResult("manifest", (found,)),))
        validation = _Validation(storage, manifest, token)
        results = [ValidationResult("manifest", tuple(_of_manifest(manifest))), validation.files(deep=deep)]
        if deep:
            results.append(validation.chunks(progress, self._threads))
        results += [validation.by(checker) for checker in self._checkers]
        checked = sum(one.bytes_checked for one in results)
        return ValidationResult(prefix, (), tuple(results), checked, manifest)

    def before_load(self, prefix: str, token: CancelToken | None = None) -> ValidationResult:
        """Check what a load does not verify anyhow: what is wrong with files is a warning, as it may be mended."""
        result = self.validate_checkpoint(prefix, token, deep=False)
        own, others = result.sub_results[:2], result.sub_results[2:]
        return replace(result, sub_results=(*map(_warned, own), *others))


def _warned(result: ValidationResult) -> ValidationResult:
    """The same, with warnings of files where there were errors."""
    if result.name != FILES:
        return result
    return replace(result, findings=tuple(replace(finding, is_error=False) for finding in result.findings))


class _Validation:
    """One check of one checkpoint."""

    def __init__(self, storage: Storage, manifest: Manifest, token: CancelToken) -> None:
        self._storage = storage
        self._manifest = manifest
        self._token = token

    def files(self, *, deep: bool) -> ValidationResult:
        """Whether all files are there, of the right size, with the right header."""
        findings: list[Finding] = []
        for number, part in enumerate(self._manifest.parts):
            self._token.check()
            findings += self._file(number, part, deep=deep)
        for file, size in self._manifest.extra_files.items():
            self._token.check()
            findings += self._extra_file(file, size)
        # What was not read because it was to stop is no finding.
        self._token.check()
        return ValidationResult(FILES, tuple(findings))

    def _file(self, number: int, part: Part, *, deep: bool) -> Iterator[Finding]:
        try:
            with self._storage.open(part.file) as reader:
                if reader.size != part.size:
                    yield _of_size(part.file, part.size, reader.size, rank=part.rank)
                elif part.data_offset:
                    yield from _of_header(self._manifest, number, reader, deep=deep)
        except CheckpointException as error:
            yield Finding(error.message, error.code, rank=part.rank, file=part.file)

    def _extra_file(self, file: str, size: int) -> Iterator[Finding]:
        """Files for other tools: nothing is read of them here."""
        try:
            with self._storage.open(file) as reader:
                if reader.size != size:
                    yield _of_size(file, size, reader.size, is_error=False)
        except CheckpointException as error:
            yield Finding(error.message, error.code, is_error=False, file=file)

    def chunks(self, progress: Progress | None, threads: int) -> ValidationResult:
        """Whether all bytes are those that were saved, and all of every tensor is there."""
        index = Index(self._manifest)
        try:
            plan(index, range(len(self._manifest.tensors.names)), {})
        except CheckpointException as error:
            return ValidationResult("chunks", (Finding(error.message, error.code),))
        walk = _Walk(self._storage, index, self._token, progress)
        for number in range(len(self._manifest.parts)):
            walk.part(number, threads)
        return ValidationResult(
            "chunks", tuple(finding for _, _, finding in sorted(walk.found, key=itemgetter(0, 1))), (), walk.done
        )

    def by(self, checker: IntegrityChecker) -> ValidationResult:
        """What somebody else's checker says; that it fails is a finding, too."""
        self._token.check()
        try:
            return ValidationResult(checker.name, tuple(checker.check(self._manifest, self._storage, self._token)))
        except Exception as error:  # noqa: BLE001 - a checker is somebody else's code
            self._token.check()
            return ValidationResult(
                checker.name, (Finding(f"it has failed: {describe(error)}", "checkpoint_checker_failed"),)
            )


class _Walk:
    """Through all chunks of a checkpoint."""

    def __init__(self, storage: Storage, index: Index, token: CancelToken, progress: Progress | None) -> None:
        self.found: list[tuple[int, int, Finding]] = []
        """What was found, with the numbers of the part and of the chunk."""
        self.done = 0
        self._storage = storage
        self._index = index
        self._token = token
        self._progress = progress
        self._total = sum(part.size - part.data_offset for part in index.manifest.parts)
        self._lock = threading.Lock()
        self._buffers = BufferPool()

    def part(self, number: int, threads: int) -> None:
        """All chunks of a part."""
        layout = self._index.layout(number)
        blocks = [*blocks_of(layout.memory_offsets, 0, layout.chunks)]
        try:
            with self._storage.open(layout.part.file) as reader:
                run_all(partial(self._block, layout, reader), blocks, self._token, threads if len(blocks) > 1 else 1)
        except CheckpointException as error:
            if not is_storage_failure(error):
                raise
            part = layout.part
            self.found.append((number, -1, Finding(error.message, error.code, rank=part.rank, file=part.file)))

    def _block(self, layout: PartLayout, reader: Reader, block: tuple[int, int]) -> None:
        """Read and check a block of chunks."""
        if len(self.found) >= FINDINGS_MAX:
            return
        first, end = block
        edges = layout.file_offsets[first : end + 1]
        buffer = self._buffers.borrow(edges[-1] - edges[0])
        data = buffer.data[: edges[-1] - edges[0]]
        chunks = [data[low - edges[0] : high - edges[0]] for low, high in pairwise(edges)]
        try:
            reader.read_into(edges[0], data)
        except CheckpointException as error:
            if not is_storage_failure(error):
                raise
            self._one_by_one(layout, reader, first, chunks)
        else:
            if not self._are_right(layout, first, chunks):
                for number, chunk in enumerate(chunks, first):
                    self._check(layout, number, chunk)
        self._buffers.return_buffer(buffer)
        self._tell(edges[-1] - edges[0])

    def _one_by_one(self, layout: PartLayout, reader: Reader, first: int, chunks: list[memoryview]) -> None:
        """Find those that cannot be read."""
        for number, chunk in enumerate(chunks, first):
            self._token.check()
            try:
                reader.read_into(layout.file_offsets[number], chunk)
            except CheckpointException as error:
                if not is_storage_failure(error):
                    raise
                self._find(layout, number, unreadable_chunk(self._index, layout, number, error))
            else:
                self._check(layout, number, chunk)

    def _are_right(self, layout: PartLayout, first: int, chunks: list[memoryview]) -> bool:
        if layout.part.stored is not None:
            return False
        return b"".join(map(xxhash.xxh3_128_digest, chunks)) == layout.digests_of(first, first + len(chunks))

    def _check(self, layout: PartLayout, number: int, chunk: memoryview) -> None:
        """Look at one as it is in memory."""
        if layout.part.stored is None:
            is_right = xxhash.xxh3_128_digest(chunk) == layout.digest(number)
        else:
            size = layout.memory_offsets[number + 1] - layout.memory_offsets[number]
            buffer = self._buffers.borrow(size)
            room = buffer.data[:size]
            is_right = decompress_chunk(layout, number, chunk, room) and (
                xxhash.xxh3_128_digest(room) == layout.digest(number)
            )
            self._buffers.return_buffer(buffer)
        if not is_right:
            self._find(layout, number, corrupt_chunk(self._index, layout, number))

    def _find(self, layout: PartLayout, number: int, why: CheckpointException) -> None:
        finding = Finding(
            why.message,
            why.code,
            tensor=self._index.manifest.tensors.names[layout.tensor_of(number)],
            rank=layout.part.rank,
            file=layout.part.file,
            chunk=number - layout.first_chunks[layout.piece_of(number)],
        )
        with self._lock:
            if len(self.found) < FINDINGS_MAX:
                self.found.append((layout.number, number, finding))

    def _tell(self, size: int) -> None:
        with self._lock:
            self.done += size
            if self._progress is not None:
                self._progress(self.done, self._total)


def _of_manifest(manifest: Manifest) -> Iterator[Finding]:
    """What is odd about a manifest that can be read."""
    if manifest.version != VERSION:
        yield Finding(
            f"it was written by another version of forged: {manifest.version}, and this reads {VERSION}",
            "checkpoint_version_other",
            is_error=False,
            file=manifest.path,
        )


def _of_size(file: str, said: int, found: int, *, rank: int | None = None, is_error: bool = True) -> Finding:
    return Finding(
        f"{file} has {found} bytes, and should have {said}",
        "checkpoint_file_size",
        is_error=is_error,
        rank=rank,
        file=file,
    )


def _of_header(manifest: Manifest, number: int, reader: Reader, *, deep: bool) -> Iterator[Finding]:
    """Whether what stands before the first piece is what was written, and says what the manifest says."""
    part = manifest.parts[number]
    header = np.empty(part.data_offset, np.uint8)
    reader.read_into(0, header.data)
    if xxhash.xxh3_128_digest(header.data) != base64.b64decode(part.header):
        yield Finding(
            f"the header of {part.file} is damaged: its bytes are not those that were saved",
            "checkpoint_header_corrupt",
            rank=part.rank,
            file=part.file,
        )
    elif deep:
        yield from _of_entries(manifest, number, reader)


def _of_entries(manifest: Manifest, number: int, reader: Reader) -> Iterator[Finding]:
    part, layout = manifest.parts[number], Index(manifest).layout(number)
    said = read_header(reader, part.file)
    starts = [layout.file_offsets[chunk] for chunk in layout.first_chunks]
    if [*said.starts, part.size] != starts:
        yield Finding(
            f"the header of {part.file} says of other arrays than the manifest",
            "checkpoint_header_differs",
            rank=part.rank,
            file=part.file,
        )
        return
    for place, entry in enumerate(said.entries):
        tensor = part.tensors[place]
        name, dtype = manifest.tensors.names[tensor], manifest.tensors.dtypes[tensor]
        kind = dtype_of(entry.dtype)
        if safetensors_name(dtype) is not None and (
            kind != dtype_of(dtype) or entry.shape != layout.piece_box(place).shape
        ):
            yield Finding(
                f"the header of {part.file} says {entry.dtype} {entry.shape} of {name}, which is another array",
                "checkpoint_header_differs",
                tensor=name,
                rank=part.rank,
                file=part.file,
            )


def verify(
    where: str | os.PathLike[str], *, timeout: float | None = None, progress: Progress | None = None
) -> ValidationResult:
    """Check every byte of the checkpoint at a path or URL."""
    from forged.checkpoint.storage.locations import storage_at

    check_timeout(timeout)
    storage, prefix = storage_at(where)
    return CheckpointValidator(storage).validate_checkpoint(prefix, CancelToken(timeout), progress=progress)
