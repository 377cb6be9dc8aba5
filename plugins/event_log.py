"""Writes facts to a file, one JSON object per line, and rotates large files.

Invariants:
- Each fact is in the files exactly once, over restarts and kills: the position is read from the files, and an
  incomplete last line is removed.
- The files are written in a thread; a slow or full disk delays deliveries and loses nothing.
- A file that is not an event log is not changed.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from forged.plugins import (
    ConfigError,
    Fact,
    Gap,
    PluginContext,
    Problem,
    Record,
    Role,
    Unavailable,
    to_json,
)

T = TypeVar("T")

API_VERSION = 1

WAIT_S = 5.0
"""How long a delivery waits for a slow disk before it raises `Unavailable`; the write continues."""
MODE = 0o600
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Non-blocking, because the path may be a pipe."""
BLOCK_BYTES = 1 << 16
LINE_START = b'{"history":"'
FULL = (errno.ENOSPC, errno.EDQUOT)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    path: str = ""
    bytes_max: Annotated[int, msgspec.Meta(ge=1 << 10, le=1 << 40)] = 64 << 20
    files_max: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 5
    types: list[str] = []
    jobs: list[str] = []
    batch_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    fsync: bool = False


def register(context: PluginContext) -> None:
    """Follow the facts that the settings select."""
    settings = context.settings(Settings)
    path = Path(settings.path) if settings.path else context.directory() / "events.jsonl"
    if wanted := what_is_wrong_with(path):
        problem = Problem(f"plugins.{context.name}.path", str(path), wanted)
        raise ConfigError(
            "event_log_path", "the event log cannot be written to this path", "name another file", [problem]
        )
    files = Files(path, bytes_max=settings.bytes_max, files_max=settings.files_max, fsync=settings.fsync)
    log = EventLog(context, settings, files)
    context.command("status", log.status, help="show the position", needs=Role.VIEWER)
    context.command("rotate", log.rotate, help="start a new file")
    context.on_stop(log.close)


def what_is_wrong_with(path: Path) -> str:
    """What the path must be for the log to be written, without changing any file; empty if it can be written."""
    try:
        return _what_is_wrong_with(path)
    except OSError as error:
        return f"an accessible path: {error.strerror}"


def _what_is_wrong_with(path: Path) -> str:
    if not path.is_absolute():
        return "an absolute path, because the daemon may run in any directory"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return "a regular file, not a link"
    if path.exists():
        return "" if os.access(path, os.R_OK | os.W_OK) else "a file that the daemon can read and write"
    directory = next(one for one in path.parents if one.exists())
    if not directory.is_dir():
        return f"in a directory, and {directory} is not one"
    return (
        "" if os.access(directory, os.W_OK | os.X_OK) else f"below a directory writable by the daemon, not {directory}"
    )


class Mark(NamedTuple):
    """The last fact in the files: its id and history."""

    history: str
    last: int


NOWHERE = Mark("", 0)


class Line(NamedTuple):
    """A line, and the position of the files after it."""

    text: bytes
    mark: Mark


def lines_of(history: str, records: Iterable[Record]) -> Iterator[Line]:
    """Facts as lines."""
    head = b'{"history":%b,' % msgspec.json.encode(history)
    for record in records:
        yield Line(head + to_json(record)[1:] + b"\n", Mark(history, record.id))


def line_of_gap(history: str, gap: Gap) -> Line:
    """A gap as a line."""
    said = {"first": gap.first, "last": gap.last, "reason": gap.reason}
    return Line(msgspec.json.encode({"history": history, "gap": said}) + b"\n", Mark(history, gap.last))


class _LastOfGap(msgspec.Struct):
    last: int


class _Place(msgspec.Struct):
    """The fields of a line that give its position."""

    history: str
    id: int = 0
    gap: _LastOfGap | None = None


def read_mark(line: bytes) -> Mark:
    """The position of a line in a file; `ValueError` if it is not a line of an event log."""
    place = msgspec.json.decode(line, type=_Place)
    last = place.gap.last if place.gap else place.id
    if not last:
        raise ValueError("neither a fact nor a gap")
    return Mark(place.history, last)


class Files:
    """The current file and the rotated ones, of which `path.1` is the latest. Used by one thread at a time."""

    def __init__(self, path: Path, *, bytes_max: int, files_max: int, fsync: bool) -> None:
        self.path = path
        self.mark = NOWHERE
        self.size = 0
        self.written = 0
        self.rotations = 0
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._fsync = fsync
        self._fd: int | None = None
        self._known = False
        """Whether the position was read from the files."""

    def write(self, lines: Iterable[Line]) -> None:
        """Write the lines that are not in the files yet; a line that cannot be written completely raises `OSError`."""
        self._open()
        waiting: list[Line] = []
        size = self.size = self._measured
        for line in lines:
            if line.mark.history == self.mark.history and line.mark.last <= self.mark.last:
                continue
            if size + len(line.text) > self._bytes_max and size:
                self._append(waiting)
                self._rotate()
                waiting, size = [], 0
            waiting.append(line)
            size += len(line.text)
        self._append(waiting)

    def rotate(self) -> bool:
        """Begin a new file, unless this one is empty."""
        self._open()
        if not self._measured:
            return False
        self._rotate()
        return True

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    @property
    def _measured(self) -> int:
        assert self._fd is not None, "a file is opened before it is used"
        return os.fstat(self._fd).st_size

    def _open(self) -> None:
        """Open the file again if it was moved or replaced."""
        if self._fd is not None and self._is_the_one(self._fd):
            return
        self.close()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.path, FLAGS | os.O_CREAT, MODE)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
            _lock(fd)
            self._recover(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._sync_directory()

    def _is_the_one(self, fd: int) -> bool:
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(fd))
        except FileNotFoundError:
            return False

    def _recover(self, fd: int) -> None:
        """Remove an incomplete last line and read the position from the files."""
        size = os.fstat(fd).st_size
        line, end = last_line(fd, size)
        while b"\0" in line:
            # After a power failure a part of the line may be zeros.
            line, end = last_line(fd, end - len(line) - 1)
        mark = _mark_in(line)
        if not LINE_START.startswith(os.pread(fd, len(LINE_START), end).partition(b"\0")[0]):
            raise OSError(errno.EINVAL, "it is not an event log: its end is not a line of one")
        if size > end:
            os.ftruncate(fd, end)
        if not self._known:
            self.mark = mark or self._mark_of_the_one_before() or NOWHERE
            self._known = True

    def _mark_of_the_one_before(self) -> Mark | None:
        try:
            fd = os.open(self._place(1), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            return _mark_in(last_line(fd, os.fstat(fd).st_size)[0])
        finally:
            os.close(fd)

    def _append(self, lines: Sequence[Line]) -> None:
        if not lines:
            return
        assert self._fd is not None, "a file is opened before it is used"
        start = self._measured
        try:
            self._write_whole(b"".join(line.text for line in lines))
        except OSError:
            self._take_back(self._fd, start)
            raise
        self.mark = lines[-1].mark
        self.size = self._measured
        self.written += len(lines)

    def _take_back(self, fd: int, size: int) -> None:
        try:
            os.ftruncate(fd, size)
        except OSError:
            # Its content is read when it is opened again.
            self._known = False
            self.close()

    def _write_whole(self, data: bytes) -> None:
        assert self._fd is not None, "a file is opened before it is used"
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        if self._fsync:
            os.fdatasync(self._fd)

    def _rotate(self) -> None:
        """Rename each file to the next number, delete the last, and begin a new file."""
        last = self._files_max - 1
        # Only up to the first unused number, so that a second attempt moves no file twice.
        end = next((number for number in range(1, last) if not os.path.lexists(self._place(number))), last)
        for number in range(end, 0, -1):
            with suppress(FileNotFoundError):
                self._place(number - 1).replace(self._place(number))
        for number in count(self._files_max):
            try:
                self._place(number).unlink()
            except FileNotFoundError:
                break
        self.rotations += 1
        self._open()

    def _place(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _sync_directory(self) -> None:
        if not self._fsync:
            return
        fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(errno.EBUSY, "another process writes to it") from error


def _mark_in(line: bytes) -> Mark | None:
    try:
        return read_mark(line) if line else None
    except ValueError as error:
        raise OSError(errno.EINVAL, "it is not an event log: its last line is not a fact or gap") from error


def last_line(fd: int, size: int) -> tuple[bytes, int]:
    """The last complete line in the first `size` bytes of a file and its offset; empty and 0 if there is none."""
    start, tail = size, b""
    while start:
        block = min(start, BLOCK_BYTES)
        start -= block
        tail = os.pread(fd, block, start) + tail
        stop = tail.rfind(b"\n")
        begin = tail.rfind(b"\n", 0, stop) if stop > 0 else -1
        if begin >= 0 or (stop >= 0 and not start):
            return tail[begin + 1 : stop], start + stop + 1
    return b"", 0


class EventLog:
    """Owns the files and the thread that writes them."""

    def __init__(self, context: PluginContext, settings: Settings, files: Files) -> None:
        self._context = context
        self._files = files
        self._working: asyncio.Future[Any] | None = None
        self._feed = context.follow(
            settings.types or Fact,
            self.deliver,
            jobs=settings.jobs,
            name="facts",
            batch_max=settings.batch_max,
            on_gap=self.tell,
        )

    async def deliver(self, records: Sequence[Record]) -> None:
        """Write facts."""
        await self._work(partial(self._files.write, lines_of(self._context.history, records)))

    async def tell(self, gap: Gap) -> None:
        """Write a gap."""
        await self._work(partial(self._files.write, [line_of_gap(self._context.history, gap)]))

    async def rotate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Begin a new file."""
        return {"rotated": await self._work(self._files.rotate)}

    def status(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The plugin's position and counters."""
        files, feed = self._files, self._feed
        return {
            "path": str(files.path),
            "bytes": files.size,
            "written": files.written,
            "rotations": files.rotations,
            "last": files.mark.last,
            "position": feed.position,
            "behind": feed.behind,
            "waiting_for": feed.waiting_for,
        }

    async def close(self) -> None:
        """Close the file after the thread's work."""
        await self._work(self._files.close)

    async def _work(self, work: Callable[[], T]) -> T:
        """Run a function in the thread, after its current work; raises `Unavailable` after `WAIT_S`."""
        while self._working is not None:
            await self._wait(self._working)
        self._working = working = asyncio.get_running_loop().run_in_executor(None, work)
        working.add_done_callback(self._ended)
        await self._wait(working)
        try:
            return working.result()
        except OSError as error:
            code = "event_log_full" if error.errno in FULL else "event_log_failed"
            reason = f"{self._files.path}: {error.strerror or error}"
            raise Unavailable(code, reason, "check the file system; the plugin retries") from error

    async def _wait(self, working: asyncio.Future[Any]) -> None:
        done, _ = await asyncio.wait([working], timeout=WAIT_S)
        if not done:
            reason = f"{self._files.path}: a write has not finished within {WAIT_S:g} s"
            raise Unavailable("event_log_slow", reason, "check the disk; the plugin waits for it")

    def _ended(self, working: asyncio.Future[Any]) -> None:
        self._working = None
        if not working.cancelled():
            # Retrieve the exception, because the waiter may have been cancelled.
            working.exception()
