"""Opening a connection to the daemon at an endpoint.

A failure says why and what to do: no daemon listens, the socket is not permitted, or the daemon does not accept.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from typing import TYPE_CHECKING, Any

from forged.errors import ConfigError, ForgedError, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

ENDPOINT_FORM = "use unix:///path, tcp://host:port or tls://host:port"
QUEUE_FULL_PAUSE_S = 0.01
START = "start one with `forged run` or `systemctl start forged`, or choose another with --socket or --endpoint"


def dial(endpoint: str, timeout_s: float) -> socket.socket:
    """A connected socket."""
    scheme, where = _parse(endpoint)
    if scheme == "unix":
        return _dial_unix(endpoint, where, timeout_s)
    connection = _dial_tcp(endpoint, where, timeout_s)
    return connection if scheme == "tcp" else _secured(endpoint, connection, where[0])


def tls_refusal(endpoint: str, error: OSError) -> ForgedError | None:
    """The TLS error, if TLS was the cause."""
    # The module is imported only for TLS endpoints, because the import is slow.
    if not endpoint.startswith("tls://"):
        return None
    import ssl

    from forged.net.transport.tls import refusal

    return refusal(endpoint, error) if isinstance(error, ssl.SSLError) else None


def no_answer(endpoint: str, waited_s: float, fix: str) -> Unavailable:
    """The error for an endpoint that does not reply."""
    return Unavailable("no_answer", f"{endpoint} did not answer within {waited_s:g} s", fix)


def _parse(endpoint: str) -> tuple[str, Any]:
    """The scheme, and the address for the socket."""
    scheme, separator, rest = endpoint.rpartition("://")
    if scheme == "unix" and rest:
        return scheme, rest
    host, _, port = rest.rpartition(":")
    if (scheme in ("tcp", "tls") or not separator) and host and port.isdecimal() and int(port) < 1 << 16:
        return scheme or "tcp", (host.strip("[]"), int(port))
    raise ConfigError("address_invalid", f"{endpoint!r} is not an endpoint", ENDPOINT_FORM)


def _dial_tcp(endpoint: str, where: tuple[str, int], timeout_s: float) -> socket.socket:
    try:
        connection = socket.create_connection(where, timeout_s)
    except UnicodeError as error:
        raise ConfigError("address_invalid", f"{where[0]!r} is not a host name", ENDPOINT_FORM) from error
    except TimeoutError as error:
        raise no_answer(endpoint, timeout_s, "check the address and the firewalls") from error
    except socket.gaierror as error:
        raise _no_daemon(endpoint, error, "check the host name") from error
    except OSError as error:
        raise _no_daemon(endpoint, error, START) from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _secured(endpoint: str, connection: socket.socket, host: str) -> socket.socket:
    from forged.net.transport.tls import client_context

    names = ("FORGED_CA", "FORGED_CERTIFICATE", "FORGED_KEY")
    try:
        context = client_context(*(os.environ.get(name) or None for name in names))
        return context.wrap_socket(connection, server_hostname=host)
    except OSError as error:
        connection.close()
        raise tls_refusal(endpoint, error) or _no_daemon(endpoint, error, "check that it speaks TLS") from error
    except BaseException:
        connection.close()
        raise


def _dial_unix(endpoint: str, path: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        _connect_unix(connection, path, time.monotonic() + timeout_s)
    except OSError as error:
        connection.close()
        from pathlib import Path

        raise _unix_error(endpoint, Path(path), error, timeout_s) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_unix(connection: socket.socket, path: str, deadline: float) -> None:
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:
            # The daemon's accept queue is full; the kernel does not report when there is room.
            if time.monotonic() >= deadline:
                raise
            time.sleep(QUEUE_FULL_PAUSE_S)


def _unix_error(endpoint: str, path: Path, error: OSError, timeout_s: float) -> ForgedError:
    if isinstance(error, PermissionError):
        return _forbidden(endpoint, path)
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return no_answer(endpoint, timeout_s, "is the daemon stuck? see its log")
    if error.errno is None:
        return ConfigError("address_invalid", f"{endpoint}: {error}", "use a shorter path")
    if isinstance(error, ConnectionRefusedError):
        if not path.is_socket():
            return ConfigError("address_invalid", f"{path} is not a socket", "check --socket and $FORGED_SOCKET")
        return Unavailable("no_daemon", f"no daemon on {endpoint}: the daemon that created this socket is gone", START)
    return _no_daemon(endpoint, error, START)


def _no_daemon(endpoint: str, error: OSError, fix: str) -> Unavailable:
    return Unavailable("no_daemon", f"no daemon on {endpoint}: {error.strerror or error}", fix)


def _forbidden(endpoint: str, path: Path) -> ConfigError:
    what = f"no permission for {endpoint}: "
    closed = next((one for one in reversed(path.absolute().parents) if not _searchable(one)), None)
    if closed is not None:
        return ConfigError("connect_not_permitted", f"{what}you cannot access the directory {closed}", "use sudo")
    found = path.stat()
    owner, group = _names(found.st_uid, found.st_gid)
    mode = stat.S_IMODE(found.st_mode)
    fix = f"join the group {group} and log in again, or use sudo" if mode & stat.S_IWGRP else "use sudo"
    what = f"{what}owner {owner}, group {group}, mode {mode:#o}"
    return ConfigError("connect_not_permitted", what, fix)


def _searchable(directory: Path) -> bool:
    return os.access(directory, os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def _names(uid: int, gid: int) -> tuple[str, str]:
    import grp
    import pwd

    try:
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        owner = f"{uid}"
    try:
        return owner, grp.getgrgid(gid).gr_name
    except KeyError:
        return owner, f"{gid}"
