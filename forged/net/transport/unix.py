"""Unix sockets: create, replace and remove the socket file of a listener.

Invariants:
- A socket file at its path already listens and has the requested mode. So a refused connection means that the socket is
  dead, and the socket of a live process is never removed.

The socket is bound and listens under a temporary name in the same directory and is then hard-linked to its path. The
link fails if the path exists, so it decides between daemons that start at the same time. The alternatives have races: a
socket bound at the path exists before it listens and looks dead to others; a rename silently replaces a live daemon's
socket; the umask is shared by all threads. The mode is set on the socket before the bind; Linux creates the file with
it (less the umask), so that the temporary file is never more open than requested.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forged.errors import ConfigError

PATH_BYTES_MAX = 107
"""`sun_path` has 108 bytes including the terminating zero."""

PUBLISH_ATTEMPTS_MAX = 16
"""The maximum number of attempts while other processes create and remove sockets at the path."""

QUEUE_FULL_RETRY_S = 0.01


@dataclass(frozen=True, slots=True)
class SocketFile:
    """The file of a listening socket of this process."""

    path: Path
    device: int
    inode: int

    def remove(self) -> None:
        """Remove the file if it is still this socket's. Call it before closing the socket: then it may be replaced."""
        try:
            found = self.path.lstat()
        except OSError:
            return
        if (found.st_dev, found.st_ino) == (self.device, self.inode):
            self.path.unlink(missing_ok=True)


def listen(path: str, mode: int, backlog: int) -> tuple[socket.socket, SocketFile]:
    """Listen at `path`. A dead socket there is replaced; a live socket or another file is an error."""
    check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        return sock, _listen(sock, Path(path), mode, backlog)
    except OSError as error:
        sock.close()
        raise _not_made(path, error) from error
    except BaseException:
        sock.close()
        raise


async def dial(path: str) -> socket.socket:
    """Connect to `path`; waits while the listener's queue is full. Raises `OSError`."""
    check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(0)
    try:
        while True:
            try:
                sock.connect(path)
            except BlockingIOError:
                # The queue is full. No event signals room, and the event loop would treat the socket as connected.
                await asyncio.sleep(QUEUE_FULL_RETRY_S)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


def check_path(path: str) -> None:
    """Raise `ConfigError` if a path is too long for a socket."""
    size = len(os.fsencode(path))
    if size > PATH_BYTES_MAX:
        raise ConfigError(
            "socket_path_too_long",
            f"the socket path {path} must have at most {PATH_BYTES_MAX} bytes, got {size}",
            "use a shorter directory",
        )


def _listen(sock: socket.socket, path: Path, mode: int, backlog: int) -> SocketFile:
    staged = _temporary_name(path)
    os.fchmod(sock.fileno(), mode)
    sock.bind(str(staged))
    try:
        staged.chmod(mode)
        sock.listen(backlog)
        made = staged.lstat()
        _publish(staged, path)
    finally:
        staged.unlink()
    return SocketFile(path, made.st_dev, made.st_ino)


def _temporary_name(path: Path) -> Path:
    """A temporary name in the same directory: the file name, shortened if needed, and a random suffix."""
    suffix = f".{secrets.token_hex(4)}"
    room = PATH_BYTES_MAX - len(os.fsencode(path.with_name("_"))) + 1 - len(suffix)
    return path.with_name(os.fsdecode(os.fsencode(path.name)[: max(room, 0)]) + suffix)


def _publish(staged: Path, path: Path) -> None:
    """Link the socket to its path; of several processes only one succeeds."""
    for _ in range(PUBLISH_ATTEMPTS_MAX):
        try:
            path.hardlink_to(staged)
        except FileExistsError:
            _remove_if_dead(path)
        else:
            return
    raise _in_use(path)


def _remove_if_dead(path: Path) -> None:
    """Remove a dead socket at `path`; raise for anything else."""
    match _state(path):
        case "foreign":
            raise ConfigError(
                "socket_path_taken",
                f"{path} exists and is not a socket",
                "remove it, or use another path",
            )
        case "live":
            raise _in_use(path)
        case "dead":
            _remove_dead(path)


def _remove_dead(path: Path) -> None:
    """Remove the dead socket, if it is still there.

    The directory is locked: of two processes that remove at once, the second could remove the socket that a third has
    linked in between. While a dead socket is at the path, no process can link there.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        if _state(path) == "dead":
            path.unlink()
    finally:
        os.close(directory)


def _state(path: Path) -> Literal["missing", "foreign", "live", "dead"]:
    """What is at `path`. A socket that does not refuse connections counts as live."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return "foreign"
    except FileNotFoundError:
        return "missing"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)
        failure = probe.connect_ex(str(path))
    if failure == errno.ENOENT:
        return "missing"
    return "dead" if failure == errno.ECONNREFUSED else "live"


def _in_use(path: Path) -> ConfigError:
    return ConfigError("socket_in_use", f"another process is listening at {path}", "stop it, or use another path")


def _not_made(path: str, error: OSError) -> ConfigError:
    reason = f"cannot create the socket {path}: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return ConfigError("socket_not_permitted", reason, "check the owner and mode of its directory")
    return ConfigError("socket_not_made", reason, "check that its directory exists and can hold sockets")
