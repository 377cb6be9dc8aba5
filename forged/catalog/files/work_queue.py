"""What is to be done with the files of checkpoints, by folder, and when a folder that failed is tried again.

Invariants:
- One task of a folder runs at once, in the order in which they were added; a task that fails comes last.
- When a storage fails, its folder waits for longer each time, and delays no other folder.
- A task that has to wait for other checkpoints or readers delays no other task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple

PAUSE_S_MIN = 1.0
PAUSE_S_MAX = 600.0
POSTPONED_S = 60.0


class FileTaskKind(StrEnum):
    """What is done with the files of a checkpoint."""

    DELETE = "deleting"
    FIND = "looking for"


class FileTask(NamedTuple):
    """One thing to do with the files of one checkpoint."""

    kind: FileTaskKind
    checkpoint_id: str


@dataclass(slots=True)
class _Folder:
    tasks: dict[FileTask, None] = field(default_factory=dict)
    postponed: dict[FileTask, float] = field(default_factory=dict)
    """When each of these is one of the tasks again."""
    is_busy: bool = False
    retry_at: float = -inf
    pause_s: float = PAUSE_S_MIN
    failing_since: float | None = None

    @property
    def next_at(self) -> float:
        """When there is something to do."""
        due_at = -inf if self.tasks else min(self.postponed.values(), default=inf)
        return inf if self.is_busy else max(self.retry_at, due_at)

    def resume_due(self, now: float) -> None:
        """Take back the postponed tasks whose time has come."""
        for task in [one for one, due_at in self.postponed.items() if due_at <= now]:
            del self.postponed[task]
            self.tasks[task] = None


class WorkQueue:
    """The tasks of all folders. Times are those of a monotonic clock."""

    def __init__(self) -> None:
        self._folders: dict[str, _Folder] = {}

    def __len__(self) -> int:
        return sum(len(one.tasks) + len(one.postponed) for one in self._folders.values())

    def clear(self) -> None:
        """Forget all tasks; a folder that is worked in stays busy."""
        for one in self._folders.values():
            one.tasks.clear()
            one.postponed.clear()
        self._drop_idle()

    def add(self, folder: str, task: FileTask) -> None:
        """Add a task; one that is there already is not added again."""
        one = self._folders.setdefault(folder, _Folder())
        if task not in one.postponed:
            one.tasks.setdefault(task)

    def begin(self, now: float, most: int) -> Iterator[str]:
        """The folders in which work can begin; at most so many are worked in at once."""
        room = most - sum(one.is_busy for one in self._folders.values())
        for name, one in self._folders.items():
            if room > 0 and one.next_at <= now:
                one.resume_due(now)
                one.is_busy = True
                room -= 1
                yield name

    def next(self, folder: str) -> FileTask | None:
        """The next task of a folder that is worked in; the work ends if there is none."""
        one = self._folders[folder]
        task = next(iter(one.tasks), None)
        if task is None:
            self.end(folder)
        return task

    def end(self, folder: str) -> None:
        """The folder is not worked in any more."""
        self._folders[folder].is_busy = False
        self._drop_idle()

    def done(self, folder: str, task: FileTask) -> None:
        one = self._folders[folder]
        one.tasks.pop(task, None)
        one.retry_at, one.pause_s, one.failing_since = -inf, PAUSE_S_MIN, None

    def postpone(self, folder: str, task: FileTask, now: float) -> None:
        """The task cannot be done yet; the work in the folder goes on."""
        one = self._folders[folder]
        if task in one.tasks:
            del one.tasks[task]
            one.postponed[task] = now + POSTPONED_S

    def failed(self, folder: str, task: FileTask, now: float) -> float:
        """The storage could not be used: the work in the folder ends for a while. Returns for how long it fails."""
        one = self._folders[folder]
        if task in one.tasks:
            del one.tasks[task]
            one.tasks[task] = None
        one.is_busy, one.retry_at = False, now + one.pause_s
        one.pause_s = min(2 * one.pause_s, PAUSE_S_MAX)
        if one.failing_since is None:
            one.failing_since = now
        return now - one.failing_since

    def next_at(self) -> float:
        """When a folder is to be tried again; in the past if one can be worked in now."""
        return min((one.next_at for one in self._folders.values()), default=inf)

    def _drop_idle(self) -> None:
        self._folders = {name: one for name, one in self._folders.items() if one.tasks or one.postponed or one.is_busy}
