"""Validation: whether a checkpoint is complete and every byte is what was saved.

Invariants:
- Nothing is changed.
- The manifest is checked against its own checksum, everything else against the manifest.
- Every fault, and everything that cannot be read, is a finding with its location.
- Memory is bounded by the blocks being read.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Protocol

import numpy as np
import xxhash

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.dtypes import dtype_of, safetensors_name
from forged.checkpoint.format.manifest import INCREMENTAL_VERSION, SUFFIX, VERSION, Manifest, Part
from forged.checkpoint.format.safetensors import read_header
from forged.checkpoint.loading.fetching import (
    BufferPool,
    corrupt_chunk,
    decompress_chunk,
    is_storage_failure,
    unreadable_chunk,
)
from forged.checkpoint.loading.manifest_index import Index, PartLayout
from forged.checkpoint.loading.read_plan import blocks_of, plan
from forged.checkpoint.model import check_timeout
from forged.checkpoint.ports import CancelToken, Reader, Storage, WouldBlock, bounded
from forged.checkpoint.progress import ByteCount, Progress
from forged.checkpoint.storage.listing import missing_parent, read_manifest
from forged.checkpoint.thread_pool import THREADS, run_all
from forged.errors import describe

FINDINGS_MAX = 200
"""The scan stops after so many findings."""
SHOWN_MAX = 20
FILES = "files"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault in a checkpoint."""

    message: str
    code: str = "checkpoint_invalid"
    is_error: bool = True
    """False for a warning: the checkpoint loads all the same."""
    tensor: str | None = None
    rank: int | None = None
    file: str | None = None
    chunk: int | None = None
    """The number of the chunk within its piece of the tensor."""
    type: ExceptionType = ExceptionType.VALIDATION_FAILED
    """The type of the exception that a load raises for it."""


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """The result of a validation, or of one of its checks."""

    name: str
    """The checkpoint, or the check."""
    findings: tuple[Finding, ...] = ()
    sub_results: tuple[ValidationResult, ...] = ()
    bytes_checked: int = 0
    """Bytes that were compared with their checksums."""
    manifest: Manifest | None = None
    """The checkpoint's manifest, if it can be read."""

    @property
    def errors(self) -> list[Finding]:
        """Findings that make the checkpoint invalid, sub-results included."""
        return [finding for finding in self._all() if finding.is_error]

    @property
    def warnings(self) -> list[Finding]:
        """Findings that do not make it invalid."""
        return [finding for finding in self._all() if not finding.is_error]

    @property
    def is_valid(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    @property
    def has_warnings(self) -> bool:
        return bool(self.warnings)

    def get_summary(self) -> str:
        """The verdict, and one line per finding."""
        verdict = "valid" if self.is_valid else "invalid"
        checks = ", ".join(f"{one.name} {'ok' if one.is_valid else 'failed'}" for one in self.sub_results)
        lines = [f"{self.name} is {verdict}" + (f": {checks}" if checks else "")]
        found = [*self.errors, *self.warnings]
        lines += [f"  {'error' if one.is_error else 'warning'}: {one.message}" for one in found[:SHOWN_MAX]]
        if len(found) > SHOWN_MAX:
            lines.append(f"  and {len(found) - SHOWN_MAX} more")
        return "\n".join(lines)

    def require_valid(self, prefix: str) -> None:
        """Raise the errors, if there are any."""
        errors = self.errors
        if errors:
            codes, types = {finding.code for finding in errors}, {finding.type for finding in errors}
            raise CheckpointException(
                f"checkpoint {prefix} cannot be loaded:\n{self.get_summary()}",
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
    """A custom check of a checkpoint's integrity."""

    @property
    def name(self) -> str:
        """The name of the check in results."""
        ...

    def check(self, manifest: Manifest, storage: Storage, token: CancelToken) -> Iterable[Finding]:
        """The faults found."""
        ...


class CompatibilityChecker(IntegrityChecker, Protocol):
    """A custom check whether a checkpoint fits the program that loads it."""


class CheckpointValidator:
    """Validates checkpoints of a storage."""

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
        """Validate a checkpoint; with `deep`, read and compare every byte."""
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
        results = [ValidationResult("manifest", tuple(_manifest_findings(manifest))), validation.files(deep=deep)]
        if deep:
            results.append(validation.chunks(progress, self._threads))
        results += [validation.run_checker(checker) for checker in self._checkers]
        checked = sum(one.bytes_checked for one in results)
        return ValidationResult(prefix, (), tuple(results), checked, manifest)

    def validate_before_load(self, prefix: str, token: CancelToken | None = None) -> ValidationResult:
        """Check what a load does not verify itself. Faults of files are warnings: the load may repair them."""
        result = self.validate_checkpoint(prefix, token, deep=False)
        format_results, checker_results = result.sub_results[:2], result.sub_results[2:]
        return replace(result, sub_results=(*map(_as_warnings, format_results), *checker_results))


def _as_warnings(result: ValidationResult) -> ValidationResult:
    """The result of the file check, with warnings instead of errors."""
    if result.name != FILES:
        return result
    return replace(result, findings=tuple(replace(finding, is_error=False) for finding in result.findings))


class _Validation:
    """One validation of one checkpoint."""

    def __init__(self, storage: Storage, manifest: Manifest, token: CancelToken) -> None:
        self._storage = storage
        self._manifest = manifest
        self._token = token

    def files(self, *, deep: bool) -> ValidationResult:
        """Whether all files exist with the right size and header."""
        findings: list[Finding] = []
        for number, part in enumerate(self._manifest.parts):
            self._token.check()
            findings += self._file(number, part, deep=deep)
        for file, size in self._manifest.extra_files.items():
            self._token.check()
            findings += self._extra_file(file, size)
        # A file that was not read because the check was cancelled is not a finding.
        self._token.check()
        return ValidationResult(FILES, tuple(findings))

    def _file(self, number: int, part: Part, *, deep: bool) -> Iterator[Finding]:
        try:
            with self._storage.open(part.file) as reader:
                if reader.size != part.size:
                    yield _size_finding(part.file, part.size, reader.size, rank=part.rank)
                elif part.data_offset:
                    yield from _header_findings(self._manifest, number, reader, deep=deep)
        except CheckpointException as error:
            cause = (missing_parent(self._storage, self._manifest) if part.is_referenced else None) or error
            yield Finding(cause.message, cause.code, rank=part.rank, file=part.file)

    def _extra_file(self, file: str, size: int) -> Iterator[Finding]:
        """Check the size of a file for other tools."""
        try:
            with self._storage.open(file) as reader:
                if reader.size != size:
                    yield _size_finding(file, size, reader.size, is_error=False)
        except CheckpointException as error:
            yield Finding(error.message, error.code, is_error=False, file=file)

    def chunks(self, progress: Progress | None, threads: int) -> ValidationResult:
        """Whether all chunks match their checksums and cover every tensor."""
        index = Index(self._manifest)
        try:
            plan(index, range(len(self._manifest.tensors.names)), {})
        except CheckpointException as error:
            return ValidationResult("chunks", (Finding(error.message, error.code),))
        scan = _ChunkScan(self._storage, index, self._token, progress)
        for number in range(len(self._manifest.parts)):
            scan.part(number, threads)
        return ValidationResult(
            "chunks", tuple(finding for _, _, finding in sorted(scan.found, key=itemgetter(0, 1))), (), scan.bytes.done
        )

    def run_checker(self, checker: IntegrityChecker) -> ValidationResult:
        """The findings of a custom checker; its failure is a finding."""
        self._token.check()
        if not self._token.may_block:
            # A checker is code of the caller.
            raise WouldBlock
        try:
            return ValidationResult(checker.name, tuple(checker.check(self._manifest, self._storage, self._token)))
        except Exception as error:  # noqa: BLE001 - a checker is code of the caller
            self._token.check()
            return ValidationResult(
                checker.name, (Finding(f"the checker failed: {describe(error)}", "checkpoint_checker_failed"),)
            )


class _ChunkScan:
    """Reads and verifies all chunks of a checkpoint."""

    def __init__(self, storage: Storage, index: Index, token: CancelToken, progress: Progress | None) -> None:
        self.found: list[tuple[int, int, Finding]] = []
        """Findings with the numbers of their part and chunk, for sorting."""
        self.bytes = ByteCount(sum(map(_used_bytes, map(index.layout, range(len(index.manifest.parts))))), progress)
        self._storage = storage
        self._index = index
        self._token = token
        self._lock = threading.Lock()
        self._buffers = BufferPool()

    def part(self, number: int, threads: int) -> None:
        """Verify all chunks of a part."""
        layout = self._index.layout(number)
        blocks = [block for run in layout.runs() for block in blocks_of(layout.memory_offsets, *run)]
        try:
            with self._storage.open(layout.part.file) as reader:
                run_all(partial(self._block, layout, reader), blocks, self._token, threads if len(blocks) > 1 else 1)
        except CheckpointException as error:
            if not is_storage_failure(error):
                raise
            part = layout.part
            self.found.append((number, -1, Finding(error.message, error.code, rank=part.rank, file=part.file)))

    def _block(self, layout: PartLayout, reader: Reader, block: tuple[int, int]) -> None:
        """Read and verify a block of chunks."""
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
            self._check_singly(layout, reader, first, chunks)
        else:
            if not self._match(layout, first, chunks):
                for number, chunk in enumerate(chunks, first):
                    self._check(layout, number, chunk)
        self._buffers.return_buffer(buffer)
        self.bytes.add(edges[-1] - edges[0])

    def _check_singly(self, layout: PartLayout, reader: Reader, first: int, chunks: list[memoryview]) -> None:
        """Read chunk by chunk, to find those that cannot be read."""
        for number, chunk in enumerate(chunks, first):
            self._token.check()
            try:
                reader.read_into(layout.file_offsets[number], chunk)
            except CheckpointException as error:
                if not is_storage_failure(error):
                    raise
                self._add_finding(layout, number, unreadable_chunk(self._index, layout, number, error))
            else:
                self._check(layout, number, chunk)

    def _match(self, layout: PartLayout, first: int, chunks: list[memoryview]) -> bool:
        if layout.part.stored is not None:
            return False
        return b"".join(map(xxhash.xxh3_128_digest, chunks)) == layout.digests_of(first, first + len(chunks))

    def _check(self, layout: PartLayout, number: int, chunk: memoryview) -> None:
        """Verify one chunk, decompressed if necessary."""
        if layout.part.stored is None:
            is_intact = xxhash.xxh3_128_digest(chunk) == layout.digest(number)
        else:
            size = layout.memory_offsets[number + 1] - layout.memory_offsets[number]
            buffer = self._buffers.borrow(size)
            out = buffer.data[:size]
            is_intact = decompress_chunk(layout, number, chunk, out) and (
                xxhash.xxh3_128_digest(out) == layout.digest(number)
            )
            self._buffers.return_buffer(buffer)
        if not is_intact:
            self._add_finding(layout, number, corrupt_chunk(self._index, layout, number))

    def _add_finding(self, layout: PartLayout, number: int, why: CheckpointException) -> None:
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


def _used_bytes(layout: PartLayout) -> int:
    """The bytes of a part's chunks in its file."""
    return sum(layout.file_offsets[end] - layout.file_offsets[first] for first, end in layout.runs())


def _manifest_findings(manifest: Manifest) -> Iterator[Finding]:
    """Faults of a readable manifest."""
    if manifest.version not in {VERSION, INCREMENTAL_VERSION}:
        yield Finding(
            f"the manifest has version {manifest.version}; this version of forged writes {VERSION} "
            f"and {INCREMENTAL_VERSION}",
            "checkpoint_version_other",
            is_error=False,
            file=manifest.path,
        )


def _size_finding(file: str, expected: int, found: int, *, rank: int | None = None, is_error: bool = True) -> Finding:
    return Finding(
        f"{file} has {found} bytes, expected {expected}",
        "checkpoint_file_size",
        is_error=is_error,
        rank=rank,
        file=file,
    )


def _header_findings(manifest: Manifest, number: int, reader: Reader, *, deep: bool) -> Iterator[Finding]:
    """Whether a part's header is what was written, and describes what the manifest describes."""
    part = manifest.parts[number]
    header = np.empty(part.data_offset, np.uint8)
    reader.read_into(0, header.data)
    if xxhash.xxh3_128_digest(header.data) != base64.b64decode(part.header):
        yield Finding(
            f"the header of {part.file} is corrupt: its checksum differs",
            "checkpoint_header_corrupt",
            rank=part.rank,
            file=part.file,
        )
    elif deep and not part.is_referenced:
        yield from _entry_findings(manifest, number, reader)


def _entry_findings(manifest: Manifest, number: int, reader: Reader) -> Iterator[Finding]:
    part, layout = manifest.parts[number], Index(manifest).layout(number)
    header = read_header(reader, part.file)
    starts = [layout.file_offsets[chunk] for chunk in layout.first_chunks]
    if [*header.starts, part.size] != starts:
        yield Finding(
            f"the header of {part.file} describes other arrays than the manifest",
            "checkpoint_header_differs",
            rank=part.rank,
            file=part.file,
        )
        return
    for piece, entry in enumerate(header.entries):
        tensor = part.tensors[piece]
        name, dtype = manifest.tensors.names[tensor], manifest.tensors.dtypes[tensor]
        kind = dtype_of(entry.dtype)
        if safetensors_name(dtype) is not None and (
            kind != dtype_of(dtype) or entry.shape != layout.piece_box(piece).shape
        ):
            yield Finding(
                f"the header of {part.file} describes {name} as {entry.dtype} {entry.shape}, unlike the manifest",
                "checkpoint_header_differs",
                tensor=name,
                rank=part.rank,
                file=part.file,
            )


def verify(
    where: str | os.PathLike[str], *, timeout: float | None = None, progress: Progress | None = None
) -> ValidationResult:
    """Validate every byte of the checkpoint at a path or URL."""
    from forged.checkpoint.storage.locations import storage_at

    check_timeout(timeout)
    storage, prefix = storage_at(where)
    return CheckpointValidator(storage).validate_checkpoint(prefix, CancelToken(timeout), progress=progress)
