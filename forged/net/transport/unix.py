"""Unix listening sockets as files: how they appear, whose they are, and how they go.

Law: what appears at a path is complete: it already listens, and has exactly the asked mode. So whoever is refused
there has met a dead socket, and nothing that lives is ever removed.

A socket is bound and listens under a name next to its path and is then hard-linked to it. The link fails if something
is there, which makes it the one step that decides between daemons that start at once. The other ways lose a race: a
bind at the path is there before it listens and looks dead to others, a rename silently takes a living daemon's place,
and the process's umask belongs to every thread that is making files. The mode is set on the socket before the bind,
which on Linux makes the file with it (less the umask), so that not even the first name is ever more open than asked.
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
"""Linux gives a socket's path 108 bytes, and the last is zero."""

PUBLISH_ATTEMPTS_MAX = 16
"""How often a path may change hands while we look at it before we give up."""

QUEUE_FULL_RETRY_S = 0.01


@dataclass(frozen=True, slots=True)
class SocketFile:
    """The file of a listening socket of ours."""

    path: Path
    device: int
    inode: int

    def remove(self) -> None:
        """Remove the file if it is still ours. Call it while the socket listens: until then nobody replaces it."""
        try:
            found = self.path.lstat()
        except OSError:
            return
        if (found.st_dev, found.st_ino) == (self.device, self.inode):
            self.path.unlink(missing_ok=True)


def listen(path: str, mode: int, backlog: int) -> tuple[socket.socket, SocketFile]:
    """A socket that listens at `path`. A dead one there is replaced; a living one, or anything else, is left alone."""
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
    """A socket connected to `path`; waits while the listener's queue is full. Raises what the system raises."""
    check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(0)
    try:
        while True:
            try:
                sock.connect(path)
            except BlockingIOError:
                # The queue is full. No event tells of its end, and the loop would take the socket for connected.
                await asyncio.sleep(QUEUE_FULL_RETRY_S)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


def check_path(path: str) -> None:
    """Raise `ConfigError` when a path is too long for a socket."""
    size = len(os.fsencode(path))
    if size > PATH_BYTES_MAX:
        raise ConfigError(
            "socket_path_too_long",
            f"the socket path {path} has {size} bytes, and the system takes {PATH_BYTES_MAX}",
            "use a shorter directory",
        )


def _listen(sock: socket.socket, path: Path, mode: int, backlog: int) -> SocketFile:
    staged = _beside(path)
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


def _beside(path: Path) -> Path:
    """A fresh name in the same directory that tells where it belongs, and is no longer than a socket's path may be."""
    suffix = f".{secrets.token_hex(4)}"
    room = PATH_BYTES_MAX - len(os.fsencode(path.with_name("_"))) + 1 - len(suffix)
    return path.with_name(os.fsdecode(os.fsencode(path.name)[: max(room, 0)]) + suffix)


def _publish(staged: Path, path: Path) -> None:
    """Give the staged socket its path, in one step that only one can win."""
    for _ in range(PUBLISH_ATTEMPTS_MAX):
        try:
            path.hardlink_to(staged)
        except FileExistsError:
            _make_way(path)
        else:
            return
    raise _in_use(path)


def _make_way(path: Path) -> None:
    """Remove the dead socket at `path`, or refuse."""
    match _look(path):
        case "foreign":
            raise ConfigError(
                "socket_path_taken",
                f"{path} exists and is not a socket; it was left as it is",
                "remove it, or listen at another path",
            )
        case "living":
            raise _in_use(path)
        case "dead":
            _remove_dead(path)


def _remove_dead(path: Path) -> None:
    """Remove the dead socket, if it is still there.

    Two that remove at once could remove what a third has published in between. So only one removes in a directory at
    a time, and while a dead socket is there nobody can publish. The lock goes with the process that holds it.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        if _look(path) == "dead":
            path.unlink()
    finally:
        os.close(directory)


def _look(path: Path) -> Literal["missing", "foreign", "living", "dead"]:
    """What is at `path`. Anything that is not known to be dead counts as living."""
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
    return "dead" if failure == errno.ECONNREFUSED else "living"


def _in_use(path: Path) -> ConfigError:
    return ConfigError("socket_in_use", f"another process is listening at {path}", "stop it, or listen at another path")


def _not_made(path: str, error: OSError) -> ConfigError:
    reason = f"the socket {path} cannot be made: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return ConfigError("socket_not_permitted", reason, "see who owns its directory")
    return ConfigError("socket_not_made", reason, "see that its directory exists and can hold sockets")
