"""What is to be done with the files of checkpoints, by folder, and when a folder that failed is tried again.

Invariants:
- One task of a folder runs at once, in the order in which they were added; a task that fails comes last.
- When a folder fails, it waits for longer each time, and delays no other folder.
- The folders of one storage, which hang together, are worked in by a limited number of tasks. When a storage does not
  answer, all of its folders wait, for longer each time; then a single one is tried.
- A task that has to wait for other checkpoints or readers delays no other task.
- To begin, to end and to ask when looks at storages and at the folders that are due, never at all folders.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count
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
class _Folder:
    name: str
    storage: _Storage
    tasks: OrderedDict[FileTask, None] = field(default_factory=OrderedDict)
    postponed: set[FileTask] = field(default_factory=set)
    due: list[tuple[float, FileTask]] = field(default_factory=list)
    """A heap: when each of those postponed is one of the tasks again."""
    is_busy: bool = False
    pause: _Pause = field(default_factory=_Pause)
    entry: int = 0
    """The number of its entry in the storage's `later`; older entries do not count."""

    def next_at(self) -> float:
        """When work can begin, as far as it depends on this folder."""
        return max(self.pause.ends_at, -inf if self.tasks else self.due[0][0])

    def resume_due(self, now: float) -> None:
        """Take back the postponed tasks whose time has come."""
        while self.due and self.due[0][0] <= now:
            _, task = heappop(self.due)
            self.postponed.remove(task)
            self.tasks[task] = None

    def clear(self) -> None:
        self.tasks.clear()
        self.postponed.clear()
        self.due.clear()


@dataclass(slots=True)
class _Storage:
    name: str
    known: int = 0
    """How many folders it has here."""
    busy: int = 0
    """In how many of them work goes on."""
    pause: _Pause = field(default_factory=_Pause)
    ready: deque[_Folder] = field(default_factory=deque)
    """Those in which work can begin now."""
    later: list[tuple[float, int, _Folder]] = field(default_factory=list)
    """A heap: when work can begin in the others, with the number of the entry."""

    def room(self, most: int) -> int:
        """In how many more folders work may begin."""
        return (most if self.pause.failing_since is None else 1) - self.busy

    def put(self, one: _Folder, entry: int) -> None:
        """Have a folder wait until work in it begins."""
        one.entry = entry
        if (at := one.next_at()) == -inf:
            self.ready.append(one)
        else:
            heappush(self.later, (at, entry, one))

    def find_due(self, now: float) -> None:
        """Add the folders whose time has come to those in which work can begin."""
        while self._first_later() <= now:
            _, _, one = heappop(self.later)
            one.resume_due(now)
            self.ready.append(one)

    def next_at(self, of_storage_max: int) -> float:
        """When work can begin; never while it has to wait for other work to end."""
        if self.room(of_storage_max) <= 0:
            return inf
        return max(self.pause.ends_at, -inf if self.ready else self._first_later())

    def _first_later(self) -> float:
        while self.later and self.later[0][1] != self.later[0][2].entry:
            heappop(self.later)
        return self.later[0][0] if self.later else inf

    def clear(self) -> None:
        """Forget the folders that are not worked in."""
        self.ready.clear()
        self.later.clear()
        self.known = self.busy


class WorkQueue:
    """The tasks of all folders. Times are those of a monotonic clock."""

    def __init__(self, folders_max: int, of_storage_max: int) -> None:
        """In how many folders, and in how many of one storage, work goes on at the same time."""
        self._folders_max = folders_max
        self._of_storage_max = of_storage_max
        self._folders: dict[str, _Folder] = {}
        self._storages: dict[str, _Storage] = {}
        """Those in which work has begun last come last."""
        self._busy = 0
        self._entries = count(1)

    def __len__(self) -> int:
        return sum(len(one.tasks) + len(one.postponed) for one in self._folders.values())

    def clear(self) -> None:
        """Forget all tasks; a folder that is worked in stays busy."""
        self._folders = {name: one for name, one in self._folders.items() if one.is_busy}
        self._storages = {name: one for name, one in self._storages.items() if one.busy}
        for folder in self._folders.values():
            folder.clear()
        for storage in self._storages.values():
            storage.clear()

    def add(self, folder: str, storage: str, task: FileTask, *, is_urgent: bool = False) -> None:
        """Add a task, an urgent one before the others of the folder; one that is there already is not added again."""
        one = self._folders.get(folder)
        if one is None:
            its_storage = self._storages.setdefault(storage, _Storage(storage))
            its_storage.known += 1
            one = self._folders[folder] = _Folder(folder, its_storage)
        if task in one.postponed:
            return
        is_first = not one.tasks
        one.tasks.setdefault(task)
        if is_urgent:
            one.tasks.move_to_end(task, last=False)
        if is_first and not one.is_busy:
            one.storage.put(one, next(self._entries))

    def begin(self, now: float) -> list[str]:
        """The folders in which work begins."""
        begun = []
        for storage in list(self._storages.values()):
            if storage.pause.ends_at > now:
                continue
            storage.find_due(now)
            while storage.ready and storage.room(self._of_storage_max) > 0 and self._busy < self._folders_max:
                one = storage.ready.popleft()
                one.is_busy = True
                storage.busy += 1
                self._busy += 1
                begun.append(one.name)
                self._storages[storage.name] = self._storages.pop(storage.name)
        return begun

    def next(self, folder: str) -> FileTask | None:
        """The next task of a folder that is worked in; the work ends if there is none."""
        one = self._folders[folder]
        task = next(iter(one.tasks), None)
        if task is None:
            self._end(one)
        return task

    def _end(self, one: _Folder) -> None:
        """The folder is not worked in any more: it waits, or is forgotten if nothing is to be done in it."""
        storage = one.storage
        one.is_busy = False
        storage.busy -= 1
        self._busy -= 1
        if one.tasks or one.postponed:
            storage.put(one, next(self._entries))
            return
        del self._folders[one.name]
        storage.known -= 1
        if not storage.known:
            del self._storages[storage.name]

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
            one.postponed.add(task)
            heappush(one.due, (now + seconds, task))

    def failed(self, folder: str, task: FileTask, now: float, *, is_hung: bool = False) -> float:
        """The folder could not be used, with `is_hung` because its storage does not answer: its work ends for a while.

        Returns for how long the folder, or the storage, fails.
        """
        one = self._folders[folder]
        if task in one.tasks:
            one.tasks.move_to_end(task)
        failing_s = one.pause.begin(now)
        if is_hung:
            failing_s = one.storage.pause.begin(now)
        else:
            one.storage.pause.end()
        self._end(one)
        return failing_s

    def next_at(self) -> float:
        """When work can begin, in the past if it can now; never while it has to wait for other work to end."""
        if self._busy >= self._folders_max:
            return inf
        return min((one.next_at(self._of_storage_max) for one in self._storages.values()), default=inf)
