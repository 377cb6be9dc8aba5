"""Plain files of a model: a file or a folder, with SHA-256 checksums.

Invariants:
- The checksum of one file is its SHA-256. That of a folder is the SHA-256 over a line `PATH SIZE CHECKSUM` for each
  file, sorted by path.
- Paths that the registry names are checked before they are used: they lead to no place outside of their folder.
- Only regular files are read, and no more bytes than they had when they were opened.
- A link to a file stands for the file; links to folders are refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from forged.checkpoint.ports import CancelToken
from forged.checkpoint.progress import ByteCount, Progress
from forged.checkpoint.thread_pool import run_all
from forged.client.model_files.description import ModelFiles, Where
from forged.errors import ConfigError, ForgedError, RequestRefused
from forged.registry.messages import Artifact, ArtifactFile, ArtifactState

SCHEME = "sha256:"
DAMAGED = "model_files_damaged"
BLOCK_BYTES = 1 << 20
FILES_MAX = 10_000
PATH_CHARS_MAX = 1000
PART_BYTES_MAX = 255
"""The limit of file systems."""
NAMES_SHOWN_MAX = 3
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_SPECIAL = frozenset({errno.ENXIO, errno.ENODEV, errno.EISDIR})


# Descriptions.


def describe_files(where: Where, token: CancelToken, progress: Progress | None = None) -> ModelFiles:
    """Describe a file, or all files of a folder, with their checksums."""
    given = Path(where)
    is_whole_folder = is_folder(given)
    try:
        root = given.resolve() if is_whole_folder else given.parent.resolve() / given.name
        paths = list(_paths_in(root)) if is_whole_folder else [root.name]
    except OSError as error:
        raise _unreadable(error.filename or given, error) from error
    if not paths:
        raise ConfigError("model_files_missing", f"{root} contains no files", "name a file, or a folder with files")
    if len(paths) > FILES_MAX:
        raise ConfigError(
            "model_files_many",
            f"{root} contains {len(paths):,} files; limit {FILES_MAX:,}",
            "pack them into an archive, and register that",
        )
    sources = {check_path(path): (root / path if is_whole_folder else root) for path in sorted(paths)}
    sizes = {path: _size_of(source) for path, source in sources.items()}
    found = hashed(sources, sizes, token, progress)
    files = [ArtifactFile(path, sizes[path], found[path]) for path in sources]
    checksum = checksum_of(files) if is_whole_folder else files[0].checksum
    return ModelFiles(Artifact(location=str(root), files=files), checksum, sum(sizes.values()))


def checksum_of(files: Sequence[ArtifactFile]) -> str:
    """The checksum of a folder with these files."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda one: one.path):
        digest.update(f"{file.path} {file.size_bytes} {file.checksum}\n".encode())
    return SCHEME + digest.hexdigest()


def is_one_file(artifact: Artifact, checksum: str) -> bool:
    """Whether the artifact is a file, and not a folder with one file."""
    return len(artifact.files) == 1 and artifact.files[0].checksum == checksum


def sources_of(artifact: Artifact, checksum: str, location: str) -> dict[str, Path]:
    """Where the files of an artifact lie, by their paths; refuses paths that are not safe."""
    paths = [check_path(file.path) for file in artifact.files]
    if len(set(paths)) < len(paths):
        raise RequestRefused("model_path_invalid", "the registry names one file twice", "register the files again")
    if is_one_file(artifact, checksum):
        return {paths[0]: Path(location)}
    return {path: Path(location, path) for path in paths}


def check_path(path: str) -> str:
    """Return the path of a file in a model's folder; refuse one that is not safe on every host."""
    parts = path.split("/")
    if len(path) > PATH_CHARS_MAX or not all(map(_is_part, parts)):
        raise RequestRefused(
            "model_path_invalid",
            f"{path[:80]!r} is not a valid path of a model's file",
            f"use a relative path of at most {PATH_CHARS_MAX} printable characters, without `..` and backslashes",
        )
    return path


def _is_part(part: str) -> bool:
    return (
        part not in ("", ".", "..")
        and part.isprintable()
        and "\\" not in part
        and len(part.encode(errors="surrogateescape")) <= PART_BYTES_MAX
    )


def _paths_in(folder: Path, under: str = "") -> Iterator[str]:
    """The paths of all files in a folder and its folders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = f"{under}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _paths_in(folder / entry.name, f"{path}/")
            elif entry.is_symlink() and entry.is_dir():
                raise ConfigError(
                    "model_files_linked", f"{entry.path} is a link to a folder", "copy the folder, or register it alone"
                )
            else:
                yield path


def _size_of(source: Path) -> int:
    with opened(source) as file:
        return file.size


# Reading.


class OpenedFile(NamedTuple):
    """A regular file, open for reading."""

    path: Path
    fd: int
    size: int

    def read(self, act: Callable[[memoryview], object], token: CancelToken, count: ByteCount) -> str:
        """Pass all blocks to `act`; returns the checksum of exactly `size` bytes."""
        digest, room, left = hashlib.sha256(), memoryview(bytearray(min(BLOCK_BYTES, max(1, self.size)))), self.size
        while left:
            token.check()
            length = self._read_into(room[: min(left, BLOCK_BYTES)])
            if not length:
                break
            digest.update(room[:length])
            act(room[:length])
            count.add(length)
            left -= length
        return SCHEME + digest.hexdigest()

    def _read_into(self, room: memoryview) -> int:
        try:
            return os.readv(self.fd, [room])
        except OSError as error:
            raise ForgedError("model_file_unreadable", f"{self.path}: {error.strerror}", "check the disk") from error


@contextmanager
def opened(source: Path) -> Iterator[OpenedFile]:
    """Open a regular file; anything else is refused without waiting for it."""
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _ABSENT:
            raise FileMissing("model_file_missing", f"{source} does not exist", "check the path") from error
        if error.errno in _SPECIAL:
            raise _not_regular(source) from error
        raise _unreadable(source, error) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _not_regular(source)
        yield OpenedFile(source, fd, found.st_size)
    finally:
        os.close(fd)


def looked_at(path: Path) -> os.stat_result | None:
    """What a path leads to; None if there is nothing. One that cannot be looked at is an error: it proves nothing."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise _unreadable(path, error) from error


def is_folder(path: Path) -> bool:
    found = looked_at(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _unreadable(source: Where, error: OSError) -> ConfigError:
    return ConfigError("model_file_unreadable", f"{source}: {error.strerror}", "check the path and the permissions")


def _not_regular(source: Path) -> ConfigError:
    return ConfigError("model_file_special", f"{source} is not a regular file", "name a file or a folder of files")


class FileMissing(ConfigError):
    """A file that does not exist."""


def hashed(
    sources: dict[str, Path], sizes: dict[str, int], token: CancelToken, progress: Progress | None
) -> dict[str, str]:
    """The checksums of files by their paths; refuses files that change meanwhile."""
    count, found = ByteCount(sum(sizes.values()), progress), dict[str, str]()

    def take(path: str) -> None:
        with opened(sources[path]) as file:
            before = os.fstat(file.fd)
            found[path] = file.read(len, token, count)
            after = os.fstat(file.fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or file.size != sizes[path]:
            raise ConfigError(
                "model_file_changed", f"{sources[path]} changed while it was read", "register it when it is complete"
            )

    run_all(take, sources, token)
    return found


# Comparison.


class FilesVerdict(NamedTuple):
    """What a comparison of a version's files with the registry has found."""

    state: ArtifactState
    problem: str = ""
    bytes_checked: int = 0


def compare_files(
    artifact: Artifact, checksum: str, location: str, token: CancelToken, progress: Progress | None = None
) -> FilesVerdict:
    """Compare every byte of plain files with the checksums."""
    disagreement = list_problem(artifact, checksum)
    if disagreement:
        return FilesVerdict(ArtifactState.DAMAGED, disagreement)
    sources = sources_of(artifact, checksum, location)
    if looked_at(Path(location)) is None:
        return FilesVerdict(ArtifactState.MISSING, f"{location} does not exist")
    count = ByteCount(sum(file.size_bytes for file in artifact.files), progress)
    problems: dict[str, str] = {}

    def compare(file: ArtifactFile) -> None:
        problem = _problem_of(file, sources[file.path], token, count)
        if problem:
            problems[file.path] = problem

    run_all(compare, artifact.files, token)
    if problems:
        return FilesVerdict(ArtifactState.DAMAGED, _summary(problems, len(artifact.files)), count.done)
    return FilesVerdict(ArtifactState.SOUND, "", count.done)


def list_problem(artifact: Artifact, checksum: str) -> str:
    """Why the list of files is not that of the version; empty if it is."""
    if is_one_file(artifact, checksum) or checksum_of(artifact.files) == checksum:
        return ""
    return f"the registry's list of files does not have the checksum {checksum} of the version"


def wrong_checksum(file: ArtifactFile) -> str:
    """It does not tell the checksum that was found: the registry is told, and a tenant may have named any file."""
    return f"its checksum is not {file.checksum}"


def _problem_of(file: ArtifactFile, source: Path, token: CancelToken, count: ByteCount) -> str:
    try:
        with opened(source) as found:
            if found.size != file.size_bytes:
                return f"it has {found.size:,} bytes, expected {file.size_bytes:,}"
            checksum = found.read(len, token, count)
    except FileMissing:
        return "it does not exist"
    return "" if checksum == file.checksum else wrong_checksum(file)


def _summary(problems: dict[str, str], files: int) -> str:
    """The first problems, and how many files have one."""
    shown = "; ".join(f"{path}: {problems[path]}" for path in sorted(problems)[:NAMES_SHOWN_MAX])
    return shown if len(problems) == 1 and files == 1 else f"{len(problems):,} of {files:,} files differ: {shown}"
