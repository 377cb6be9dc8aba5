"""The slots of a host as files in a directory of shared memory.

Invariants:
- Only the daemon's user may enter the directory; the slots are regular files of mode 0600.
- A name or file that the daemon has not made is not opened, followed or deleted.
- The memory of a slot is reserved when it is made, so that writing to it cannot fail.
- One daemon uses a directory at a time, as long as it holds the lock of the file that names its data directory.
- The slots of a daemon whose data directory is gone are deleted by the next daemon of its user, unless it still runs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from forged.errors import RequestRefused

SUFFIX = ".slot"
OWNER = "daemon"
"""The file that names the data directory of the daemon that has made these slots."""
MODE = 0o600
DIRECTORY_MODE = 0o700
FREE_SHARE = 8
"""One part in so many of the shared memory stays free for other programs."""
LOCK_TRIES = 50
LOCK_PAUSE_S = 0.02
_ID = re.compile(r"[0-9a-f]{32}")
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class SlotDirectory:
    """The directory of one daemon's slots."""

    def __init__(self, path: Path, data_dir: str) -> None:
        self.path = path
        self._data_dir = data_dir
        self._threads = threading.RLock()
        """Held while slots are made, found or deleted, since the last one goes with its directory."""
        self._lock: int | None = None
        """The locked file that names the data directory, while this daemon uses the directory."""

    def sweep(self) -> None:
        """Delete the slots of daemons of this user that do not run and whose data directory is gone."""
        owners: list[Path] = []
        with suppress(FileNotFoundError):
            owners += self.path.parent.glob(f"*/{OWNER}")
        for owner in owners:
            with suppress(OSError, RequestRefused, ValueError):
                self._require_own(owner.parent)
                lock = _locked(owner)
                try:
                    if lock is not None and not Path(owner.read_text()).exists():
                        for entry in owner.parent.glob(f"*{SUFFIX}"):
                            entry.unlink()
                        owner.unlink()
                        owner.parent.rmdir()
                finally:
                    if lock is not None:
                        os.close(lock)

    def close(self) -> None:
        """Leave the directory to the next daemon."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def find(self) -> dict[str, int]:
        """The slots in the directory, with their sizes."""
        with self._threads:
            if not self.path.is_dir():
                return {}
            self._open()
            return self._found()

    def _found(self) -> dict[str, int]:
        found = {}
        for entry in os.scandir(self.path):
            slot_id = entry.name.removesuffix(SUFFIX)
            if entry.name.endswith(SUFFIX) and _ID.fullmatch(slot_id):
                with suppress(OSError, RequestRefused):
                    fd = self.open_slot(slot_id, os.O_RDONLY)
                    found[slot_id] = os.fstat(fd).st_size
                    os.close(fd)
        return found

    def _open(self) -> None:
        """Make the directory and lock it, or check that it is the daemon's own."""
        for _ in range(LOCK_TRIES):
            try:
                for directory in (self.path.parent, self.path):
                    with suppress(FileExistsError):
                        directory.mkdir(mode=DIRECTORY_MODE)
                    self._require_own(directory)
                if self._lock is None:
                    self._lock = _locked(self.path / OWNER)
            except FileNotFoundError:
                # Another daemon has just deleted the common directory, or this one as that of a daemon that is gone.
                continue
            except OSError as error:
                raise RequestRefused(
                    "slots_directory_invalid", f"cannot make {self.path}: {error.strerror}", "set slot_dir"
                ) from error
            if self._lock is not None:
                os.pwrite(self._lock, self._data_dir.encode(), 0)
                os.ftruncate(self._lock, len(self._data_dir.encode()))
                return
            # A daemon that starts locks the files of all daemons for a moment.
            time.sleep(LOCK_PAUSE_S)
        raise RequestRefused(
            "slots_in_use",
            f"{self.path} is used by another daemon with the same history",
            "run one of the daemons that were restored from the same backup, or set another slot_dir",
        )

    def _require_own(self, directory: Path) -> None:
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise RequestRefused(
                "slots_directory_invalid",
                f"{directory} must be a directory of user {os.geteuid()} that no other user may enter",
                "remove it, or set slot_dir to another one",
            )

    def path_of(self, slot_id: str) -> str:
        if not _ID.fullmatch(slot_id):
            raise RequestRefused("slot_unknown", f"{slot_id[:40]!r} is no slot", "")
        return f"{self.path}/{slot_id}{SUFFIX}"

    def make(self, slot_ids: Iterable[str], size_bytes: int) -> list[str]:
        """Make slots and reserve their memory, all or none."""
        with self._threads:
            return self._made(list(slot_ids), size_bytes)

    def _made(self, slot_ids: list[str], size_bytes: int) -> list[str]:
        paths = [self.path_of(slot_id) for slot_id in slot_ids]
        self._open()
        try:
            self._require_space(len(paths) * size_bytes)
            for path in paths:
                fd = os.open(path, _OPEN | os.O_RDWR | os.O_CREAT | os.O_EXCL, MODE)
                try:
                    os.fchmod(fd, MODE)
                    os.posix_fallocate(fd, 0, size_bytes)
                finally:
                    os.close(fd)
        except OSError as error:
            self.delete(slot_ids)
            fix = "free shared memory" if error.errno == errno.ENOSPC else f"check {self.path}"
            raise RequestRefused("slots_unavailable", f"cannot make slots: {error.strerror}", fix) from error
        except BaseException:
            self.delete(slot_ids)
            raise
        return paths

    def _require_space(self, wanted: int) -> None:
        found = os.statvfs(self.path)
        free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        if wanted > free - total // FREE_SHARE:
            raise RequestRefused(
                "slots_full",
                f"slots of {wanted} bytes do not fit into {self.path}: {free} of {total} bytes are free, and one part "
                f"in {FREE_SHARE} stays free",
                "enlarge /dev/shm, or stage smaller states; until then the worker stages into its own memory",
            )

    def open_slot(self, slot_id: str, flags: int) -> int:
        """Open a slot, if it is a file that this class has made."""
        fd = os.open(self.path_of(slot_id), _OPEN | flags)
        found = os.fstat(fd)
        is_own = found.st_uid == os.geteuid() and found.st_nlink == 1
        if not stat.S_ISREG(found.st_mode) or not is_own or stat.S_IMODE(found.st_mode) != MODE:
            os.close(fd)
            raise RequestRefused("slot_invalid", f"slot {slot_id} is not a file that this daemon has made", "")
        return fd

    def delete(self, slot_ids: Iterable[str]) -> None:
        """Delete slots, and the directory with the last one; ignores missing ones, and those of another daemon."""
        with self._threads:
            if self._lock is None:
                return
            for slot_id in slot_ids:
                Path(self.path_of(slot_id)).unlink(missing_ok=True)
            with suppress(OSError):
                if not any(self.path.glob(f"*{SUFFIX}")):
                    (self.path / OWNER).unlink()
                    self.close()
                    self.path.rmdir()
                    self.path.parent.rmdir()


def _locked(path: Path) -> int | None:
    """Open and lock a file; None if another process has it locked, or has just deleted it."""
    fd = os.open(path, _OPEN | os.O_RDWR | os.O_CREAT, MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if os.fstat(fd).st_nlink == 0:
        os.close(fd)
        return None
    return fd
