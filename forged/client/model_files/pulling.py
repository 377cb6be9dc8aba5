"""Copies the files of a version out of the place where they were registered.

Invariants:
- The copy appears under its name when all of its bytes are compared with their checksums and durable.
- Nothing that exists is replaced.
- No path that the registry names, and no link, leads out of the copy's folder. A copy gets a hidden name only from
  its caller.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from forged.checkpoint.export.conversion import ConversionOptions, convert
from forged.checkpoint.export.external_files import SAFETENSORS
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.progress import ByteCount, Progress
from forged.checkpoint.storage.listing import delete
from forged.checkpoint.storage.locations import storage_at
from forged.checkpoint.thread_pool import run_all
from forged.client.model_files.checkpoint_files import require_content
from forged.client.model_files.comparison import is_checkpoint, location_of, named
from forged.client.model_files.description import Where
from forged.client.model_files.plain_files import (
    DAMAGED,
    OpenedFile,
    check_path,
    is_one_file,
    list_problem,
    opened,
    sources_of,
    wrong_checksum,
)
from forged.errors import ConfigError, ForgedError, RequestRefused
from forged.file_sync import make_directory, rename_new, sync_directory
from forged.registry.messages import Artifact, ArtifactFile
from forged.registry.model import ModelMetadata

HIDDEN = ".part"


@dataclass(frozen=True, slots=True)
class Pulled:
    """A copy of a version's files."""

    path: Path
    files: int
    size_bytes: int
    left_out: tuple[str, ...] = ()
    """Values of a checkpoint that the format of the copy cannot hold."""


def pull(
    metadata: ModelMetadata,
    artifact: Artifact,
    target: Where | None,
    token: CancelToken,
    progress: Progress | None = None,
    location: str = "",
) -> Pulled:
    """Copy the files of a version to `target`, or into it if it is a folder or ends with `/`.

    Default: the current folder.
    """
    where = location_of(metadata, artifact, location)
    path = _free_target(metadata, artifact, os.fspath(target or "."))
    if is_checkpoint(metadata, artifact):
        return _convert(metadata, where, path, token, progress)
    problem = list_problem(artifact, metadata.checksum)
    if problem:
        raise ForgedError(DAMAGED, problem, "register the files again")
    _copy(_Copy(metadata, artifact, where, path), token, progress)
    return Pulled(path, len(artifact.files), sum(file.size_bytes for file in artifact.files))


def _free_target(metadata: ModelMetadata, artifact: Artifact, text: str) -> Path:
    """The name of the copy, which is free."""
    target = Path(text)
    if target.is_dir() or text.endswith("/"):
        target /= _default_name(metadata, artifact)
    if os.path.lexists(target):
        raise RequestRefused("target_exists", f"{target} exists already", "name another target, or delete it")
    try:
        make_directory(target.parent)
    except OSError as error:
        raise ConfigError("target_unusable", f"{target.parent}: {error.strerror}", "name another target") from error
    return target


def _default_name(metadata: ModelMetadata, artifact: Artifact) -> str:
    if not is_checkpoint(metadata, artifact) and is_one_file(artifact, metadata.checksum):
        name = check_path(artifact.files[0].path).rpartition("/")[2]
        # A hidden file, such as `.bash_profile` in the home directory, may be one that other programs obey.
        if not name.startswith("."):
            return name
    name = check_path(f"{metadata.model_id.rpartition('/')[2]}-{metadata.version}")
    return name + SAFETENSORS if is_checkpoint(metadata, artifact) else name


def _convert(metadata: ModelMetadata, where: str, path: Path, token: CancelToken, progress: Progress | None) -> Pulled:
    require_content(where, metadata.checksum, token)
    converted = convert(where, path, ConversionOptions(progress=progress), token)
    try:
        # The checkpoint may have been replaced since it was first looked at.
        require_content(where, metadata.checksum, token)
    except BaseException:
        _remove_converted(path)
        raise
    return Pulled(path, 1, converted.size_bytes, converted.left_out)


def _remove_converted(path: Path) -> None:
    """Delete a copy of a checkpoint: a file, or a checkpoint again, which is a folder with a manifest beside it."""
    if path.is_dir():
        delete(*storage_at(path), force=True)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of plain files under a name that nobody else uses."""

    metadata: ModelMetadata
    artifact: Artifact
    where: str
    path: Path

    def hidden(self) -> Path:
        return self.path.with_name(f".{self.path.name[:100]}.{secrets.token_hex(4)}{HIDDEN}")


def _copy(copy: _Copy, token: CancelToken, progress: Progress | None) -> None:
    sources = sources_of(copy.artifact, copy.metadata.checksum, copy.where)
    is_file = is_one_file(copy.artifact, copy.metadata.checksum)
    hidden = copy.hidden()
    count = ByteCount(sum(file.size_bytes for file in copy.artifact.files), progress)

    def take(file: ArtifactFile) -> None:
        with opened(sources[file.path]) as source:
            _copy_file(copy, file, source, hidden if is_file else hidden / file.path, token, count)

    try:
        if not is_file:
            _make_folders(hidden, sources)
        run_all(take, copy.artifact.files, token)
        if not is_file:
            _sync_folders(hidden)
        rename_new(os.fspath(hidden), os.fspath(copy.path))
        sync_directory(copy.path.parent)
    except BaseException as error:
        _remove(hidden)
        if isinstance(error, OSError):
            raise _untranslated(copy.path, error) from error
        raise


def _copy_file(
    copy: _Copy, file: ArtifactFile, source: OpenedFile, path: Path, token: CancelToken, count: ByteCount
) -> None:
    if source.size != file.size_bytes:
        raise _damaged(copy, file, f"it has {source.size:,} bytes, expected {file.size_bytes:,}")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(fd, "wb", buffering=0) as written:

        def write(block: memoryview) -> None:
            while block:
                block = block[written.write(block) :]

        checksum = source.read(write, token, count)
        os.fsync(fd)
    if checksum != file.checksum:
        raise _damaged(copy, file, wrong_checksum(file))


def _damaged(copy: _Copy, file: ArtifactFile, problem: str) -> ForgedError:
    name = named(copy.metadata)
    return ForgedError(
        DAMAGED,
        f"{file.path} of {name}, at {copy.where}: {problem}; nothing was copied",
        f"`forgectl models verify {quote(name)}` checks all files",
    )


def _make_folders(folder: Path, paths: dict[str, Path]) -> None:
    folder.mkdir()
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)


def _sync_folders(folder: Path) -> None:
    for path, _, _ in os.walk(folder):
        sync_directory(Path(path))


def _remove(hidden: Path) -> None:
    if hidden.is_dir() and not hidden.is_symlink():
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        hidden.unlink(missing_ok=True)


def _untranslated(path: Path, error: OSError) -> ForgedError:
    if error.errno == errno.EEXIST:
        return RequestRefused("target_exists", f"{path} exists already", "name another target, or delete it")
    return ConfigError("target_unusable", f"{path}: {error.strerror}", "name another target")
