"""Opening a connection, and the errors of a failure."""

from __future__ import annotations

import grp
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forged.errors import ConfigError, ForgedError, Unavailable
from forged.plain_client.dial import dial

LONG_S = 60.0
SHORT_S = 0.05
NOBODY = 65534
SOME_GROUP = 1


@contextmanager
def listening(path: Path, backlog: int = 8) -> Iterator[Path]:
    """A listening socket with a limited accept queue."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(backlog)
        yield path


@contextmanager
def unprivileged_user() -> Iterator[None]:
    """Act as an unprivileged user if the tests run as root."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that all users can access."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def refused(endpoint: str, timeout_s: float = LONG_S) -> ForgedError:
    with pytest.raises(ForgedError) as error:
        dial(endpoint, timeout_s).close()
    return error.value


class TestUnix:
    def test_dial_connects_to_a_listening_socket(self, tmp_path: Path) -> None:
        with listening(tmp_path / "s") as path:
            dial(f"unix://{path}", LONG_S).close()

    def test_missing_socket_error_says_how_to_start_a_daemon(self, tmp_path: Path) -> None:
        error = refused(f"unix://{tmp_path}/none")
        assert (type(error), error.code) == (Unavailable, "no_daemon")
        assert "No such file" in error.message
        assert "start one with `forged run`" in error.fix

    def test_socket_of_a_dead_daemon_is_reported_as_such(self, tmp_path: Path) -> None:
        with listening(tmp_path / "s") as path:
            pass
        error = refused(f"unix://{path}")
        assert (type(error), error.code) == (Unavailable, "no_daemon")
        assert "the daemon that created this socket is gone" in error.message

    def test_path_that_is_no_socket_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        error = refused(f"unix://{tmp_path}/file")
        assert (type(error), error.message) == (ConfigError, f"{tmp_path}/file is not a socket")

    def test_too_long_path_is_named(self) -> None:
        error = refused(f"unix:///{'x' * 200}")
        assert (type(error), error.code) == (ConfigError, "address_invalid")
        assert "too long" in error.message

    def test_a_full_accept_queue_times_out(self, tmp_path: Path) -> None:
        with listening(tmp_path / "s", backlog=0) as path, dial(f"unix://{path}", LONG_S):
            error = refused(f"unix://{path}", SHORT_S)
        assert (type(error), error.code) == (Unavailable, "no_answer")
        assert f"did not answer within {SHORT_S} s" in error.message


class TestPermission:
    @pytest.mark.parametrize(
        ("mode", "fix"), [(0o660, "join the group {group} and log in again, or use sudo"), (0o600, "use sudo")]
    )
    def test_permission_error_names_owner_group_and_mode(self, open_directory: Path, mode: int, fix: str) -> None:
        with listening(open_directory / "s") as path:
            if os.geteuid():
                path.chmod(mode & ~0o600)
            else:
                path.chmod(mode)
                os.chown(path, 0, SOME_GROUP)
            with unprivileged_user():
                error = refused(f"unix://{path}")
            group = grp.getgrgid(path.stat().st_gid).gr_name
        assert (type(error), error.code) == (ConfigError, "connect_not_permitted")
        assert f"group {group}, mode 0o" in error.message
        assert error.fix == fix.format(group=group)

    def test_inaccessible_directory_is_named(self, open_directory: Path) -> None:
        inner = open_directory / "inner"
        inner.mkdir(mode=0o700)
        with listening(inner / "s") as path:
            inner.chmod(0)
            with unprivileged_user():
                error = refused(f"unix://{path}")
            inner.chmod(0o700)
        assert (type(error), error.code) == (ConfigError, "connect_not_permitted")
        assert f"you cannot access the directory {inner}" in error.message


class TestTcp:
    def test_a_port_without_listener_is_reported(self) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            error = refused(f"tcp://127.0.0.1:{unused.getsockname()[1]}")
        assert (type(error), error.code) == (Unavailable, "no_daemon")

    def test_unknown_host_is_named(self) -> None:
        error = refused("tcp://host.invalid:1")
        assert (type(error), error.fix) == (Unavailable, "check the host name")

    def test_invalid_host_is_a_config_error(self) -> None:
        assert isinstance(refused("tcp://a..b:1"), ConfigError)

    def test_connect_timeout_is_reported_as_such(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def time_out(*_: object) -> None:
            raise TimeoutError("timed out")

        monkeypatch.setattr(socket, "create_connection", time_out)
        error = refused("tcp://10.0.0.1:1", 3.0)
        assert (error.code, error.message) == ("no_answer", "tcp://10.0.0.1:1 did not answer within 3 s")

    def test_a_plain_port_does_not_speak_tls(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            error = refused(f"tls://127.0.0.1:{port}", SHORT_S)
        assert isinstance(error, ForgedError)
        assert f"{port}" in error.message


@pytest.mark.parametrize("endpoint", ["gopher://x:1", "tcp://host", "tcp://:1", "tcp://h:65536", "unix://", "x", ""])
def test_invalid_endpoint_error_shows_the_valid_forms(endpoint: str) -> None:
    error = refused(endpoint)
    assert (type(error), error.code) == (ConfigError, "address_invalid")
