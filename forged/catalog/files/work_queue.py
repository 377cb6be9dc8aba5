"""What is to be done with the files of checkpoints, by folder, and when a folder that failed is tried again.

Invariants:
- One task of a folder runs at once, in the order in which they were added; a task that fails comes last.
- When a folder fails, it waits for longer each time, and delays no other folder.
- The folders of one storage, which hang together, are worked in by a limited number of tasks. When a storage does not
  answer, all of its folders wait, for longer each time; then a single one is tried.
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


class FileTaskKind(StrEnum):
    """What is done with the files of a checkpoint."""

    DELETE = "deleting"
    FIND = "looking for"
    SCRUB = "scrubbing"
    VERIFY = "verifying"
    COMPACT = "compacting"


class FileTask(NamedTuple):
    """One thing to do with the files of one checkpoint."""

    kind: FileTaskKind
    checkpoint_id: str


@dataclass(slots=True)
class _Pause:
    """Until when something that has failed is not tried again."""

    ends_at: float = -inf
    next_s: float = PAUSE_S_MIN
    failing_since: float | None = None

    def begin(self, now: float) -> float:
        """It has failed. Returns for how long it fails."""
        self.ends_at = now + self.next_s
        self.next_s = min(2 * self.next_s, PAUSE_S_MAX)
        if self.failing_since is None:
            self.failing_since = now
        return now - self.failing_since

    def end(self) -> None:
        """It has not failed."""
        self.ends_at, self.next_s, self.failing_since = -inf, PAUSE_S_MIN, None


@dataclass(slots=True)
class _Storage:
    name: str
    busy: int = 0
    """In how many of its folders work goes on."""
    pause: _Pause = field(default_factory=_Pause)

    def room(self, most: int) -> int:
        """In how many more folders work may begin."""
        return (most if self.pause.failing_since is None else 1) - self.busy


@dataclass(slots=True)
class _Folder:
    storage: _Storage
    tasks: dict[FileTask, None] = field(default_factory=dict)
    postponed: dict[FileTask, float] = field(default_factory=dict)
    """When each of these is one of the tasks again."""
    is_busy: bool = False
    pause: _Pause = field(default_factory=_Pause)

    def next_at(self, of_storage_max: int) -> float:
        """When work can begin; never while it has to wait for other work to end."""
        if self.is_busy or self.storage.room(of_storage_max) <= 0:
            return inf
        due_at = -inf if self.tasks else min(self.postponed.values(), default=inf)
        return max(self.pause.ends_at, self.storage.pause.ends_at, due_at)

    def resume_due(self, now: float) -> None:
        """Take back the postponed tasks whose time has come."""
        for task in [one for one, due_at in self.postponed.items() if due_at <= now]:
            del self.postponed[task]
            self.tasks[task] = None


class WorkQueue:
    """The tasks of all folders. Times are those of a monotonic clock."""

    def __init__(self, folders_max: int, of_storage_max: int) -> None:
        """In how many folders, and in how many of one storage, work goes on at the same time."""
        self._folders_max = folders_max
        self._of_storage_max = of_storage_max
        self._folders: dict[str, _Folder] = {}
        self._storages: dict[str, _Storage] = {}

    def __len__(self) -> int:
        return sum(len(one.tasks) + len(one.postponed) for one in self._folders.values())

    def clear(self) -> None:
        """Forget all tasks; a folder that is worked in stays busy."""
        for one in self._folders.values():
            one.tasks.clear()
            one.postponed.clear()
        self._drop_idle()

    def add(self, folder: str, storage: str, task: FileTask, *, is_urgent: bool = False) -> None:
        """Add a task, an urgent one before the others of the folder; one that is there already is not added again."""
        one = self._folders.get(folder)
        if one is None:
            one = self._folders[folder] = _Folder(self._storages.setdefault(storage, _Storage(storage)))
        if task in one.postponed:
            return
        if is_urgent:
            one.tasks = {task: None, **one.tasks}
        else:
            one.tasks.setdefault(task)

    def begin(self, now: float) -> Iterator[str]:
        """The folders in which work begins."""
        room = self._room()
        for name, one in self._folders.items():
            if room > 0 and one.next_at(self._of_storage_max) <= now:
                one.resume_due(now)
                one.is_busy = True
                one.storage.busy += 1
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
        one = self._folders[folder]
        one.is_busy = False
        one.storage.busy -= 1
        self._drop_idle()

    def done(self, folder: str, task: FileTask) -> None:
        one = self._folders[folder]
        one.tasks.pop(task, None)
        one.pause.end()
        one.storage.pause.end()

    def postpone(self, folder: str, task: FileTask, now: float, seconds: float) -> None:
        """The task cannot be done yet; the work in the folder goes on."""
        one = self._folders[folder]
        one.storage.pause.end()
        if task in one.tasks:
            del one.tasks[task]
            one.postponed[task] = now + seconds

    def failed(self, folder: str, task: FileTask, now: float, *, is_hung: bool = False) -> float:
        """The folder could not be used, with `is_hung` because its storage does not answer: its work ends for a while.

        Returns for how long the folder, or the storage, fails.
        """
        one = self._folders[folder]
        if task in one.tasks:
            del one.tasks[task]
            one.tasks[task] = None
        failing_s = one.pause.begin(now)
        if is_hung:
            failing_s = one.storage.pause.begin(now)
        else:
            one.storage.pause.end()
        self.end(folder)
        return failing_s

    def next_at(self) -> float:
        """When work can begin, in the past if it can now; never while it has to wait for other work to end."""
        if self._room() <= 0:
            return inf
        return min((one.next_at(self._of_storage_max) for one in self._folders.values()), default=inf)

    def _room(self) -> int:
        """In how many more folders work may begin."""
        return self._folders_max - sum(one.is_busy for one in self._folders.values())

    def _drop_idle(self) -> None:
        self._folders = {name: one for name, one in self._folders.items() if one.tasks or one.postponed or one.is_busy}
        self._storages = {one.storage.name: one.storage for one in self._folders.values()}
