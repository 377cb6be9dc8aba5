"""What the catalogue's service needs of the other services, and of the files of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from forged.errors import Unavailable
from forged.jobs.model import SettingValue

FOLDER_MISSING = "checkpoint_folder_missing"
"""The code of the error for a local folder that does not exist: deleted by hand, or not mounted."""
STORAGE_HANGS = "checkpoint_storage_hangs"
"""The code of the error for a storage that does not answer, or has not answered an earlier call yet."""

Progress = Callable[[int, int], None]
"""Told the bytes that are done and those in all; in the event loop."""


@dataclass(frozen=True, slots=True)
class JobsPort:
    """What the catalogue needs to know of the jobs and their training."""

    settings: Callable[[str], Mapping[str, SettingValue] | None] = lambda job: {}
    """A job's settings; None if there is no such job."""
    step: Callable[[str], int | None] = lambda job: None
    """The step that a job has committed; None before its first world."""
    generation: Callable[[str], int] = lambda job: 0
    is_registered: Callable[[str, str, bytes], bool] = lambda job, worker_id, incarnation: True
    """Whether a worker is registered with a job."""


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """The files of a checkpoint: where they are, and what its manifest must say so that they are touched."""

    path: str
    save_id: str
    job: str | None
    """None: any job."""
    root: str | None = None
    """Nothing outside this directory or bucket folder is touched, and no symbolic link in it is followed."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """What the manifest of a checkpoint that is there as a whole says."""

    size_bytes: int
    """Of its own files."""
    parent_path: str
    """The path of the checkpoint whose files it uses, the newest of several; empty if it uses none."""


class CheckpointFiles(Protocol):
    """The files of checkpoints. A storage that cannot be used raises a `ForgedError`; the call is repeated later.

    Each call reads the manifest first. A checkpoint is not touched if its manifest has another save id or job. A call
    that its storage does not answer is given up after a while, with the code `STORAGE_HANGS`.
    """

    def storage_of(self, path: str) -> str:
        """The storage of a path, such as a mounted file system or a bucket, which hangs as a whole if it hangs."""
        ...

    async def find(self, location: CheckpointLocation) -> FoundCheckpoint | None:
        """The checkpoint if it is there as a whole; None if it is not."""
        ...

    async def delete(self, location: CheckpointLocation) -> None:
        """Delete the checkpoint, or what an unfinished save or deletion of it has left; nothing there is no error."""
        ...

    async def verify(self, location: CheckpointLocation, bytes_per_s: int, progress: Progress) -> str:
        """Compare every byte with its checksum, at this rate; empty if all are correct, else what is wrong."""
        ...

    async def repair(self, location: CheckpointLocation) -> bool:
        """Replace corrupt bytes by healthy copies, where there are any; returns whether something was replaced."""
        ...

    async def compact(self, location: CheckpointLocation, progress: Progress) -> int:
        """Make a full checkpoint of an incremental one; returns its size."""
        ...


class NoFiles:
    """Files that cannot be reached: for a daemon that is to touch none."""

    def storage_of(self, path: str) -> str:
        return "/"

    async def find(self, location: CheckpointLocation) -> FoundCheckpoint | None:
        raise _unreachable(location)

    async def delete(self, location: CheckpointLocation) -> None:
        raise _unreachable(location)

    async def verify(self, location: CheckpointLocation, bytes_per_s: int, progress: Progress) -> str:
        raise _unreachable(location)

    async def repair(self, location: CheckpointLocation) -> bool:
        raise _unreachable(location)

    async def compact(self, location: CheckpointLocation, progress: Progress) -> int:
        raise _unreachable(location)


def _unreachable(location: CheckpointLocation) -> Unavailable:
    return Unavailable("checkpoint_files_unreachable", f"this daemon touches no files, also not {location.path}", "")
