from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forged.errors import ConfigError
from forged.net.transport import unix

BACKLOG = 16
MODE = 0o660
STARTERS = 8


@contextmanager
def listening(path: Path, mode: int = MODE) -> Iterator[unix.SocketFile]:
    sock, file = unix.listen(str(path), mode, BACKLOG)
    with sock:
        yield file


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def leave_dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_socket_mode_does_not_depend_on_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with listening(tmp_path / "socket", mode):
            assert (tmp_path / "socket").stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_a_socket_is_never_more_open_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    chmod = Path.chmod

    def look_first(path: Path, mode: int) -> None:
        seen.append(path.lstat().st_mode & 0o777)
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", look_first)
    before = os.umask(0)
    try:
        with listening(tmp_path / "socket", 0o600):
            assert seen == [0o600]
    finally:
        os.umask(before)


def test_a_socket_answers_from_the_moment_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    hardlink_to = Path.hardlink_to

    def look_first(path: Path, target: Path) -> None:
        seen.append(answers(target))
        hardlink_to(path, target)

    monkeypatch.setattr(Path, "hardlink_to", look_first)
    with listening(tmp_path / "socket"):
        assert seen == [True]


def test_nothing_but_the_socket_is_in_the_directory(tmp_path: Path) -> None:
    leave_dead_socket(tmp_path / "socket")
    with listening(tmp_path / "socket"):
        assert [entry.name for entry in tmp_path.iterdir()] == ["socket"]


def test_a_dead_socket_is_replaced(tmp_path: Path) -> None:
    leave_dead_socket(tmp_path / "socket")
    with listening(tmp_path / "socket"):
        assert answers(tmp_path / "socket")


def test_a_living_socket_is_refused_by_name_and_goes_on_living(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listening(path):
        with pytest.raises(ConfigError, match=str(path)) as raised:
            unix.listen(str(path), MODE, BACKLOG)
        assert raised.value.code == "socket_in_use"
        assert answers(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["socket"]


def test_a_living_socket_with_a_full_queue_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(path)
        listener.listen(0)
        waiting.connect(path)
        with pytest.raises(ConfigError) as raised:
            unix.listen(path, MODE, BACKLOG)
    assert raised.value.code == "socket_in_use"


def test_a_living_datagram_socket_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(path)
        with pytest.raises(ConfigError) as raised:
            unix.listen(path, MODE, BACKLOG)
    assert raised.value.code == "socket_in_use"


def make_file(path: Path) -> None:
    path.write_text("precious")


def make_link_to_dead_socket(path: Path) -> None:
    leave_dead_socket(path.with_name("dead"))
    path.symlink_to(path.with_name("dead"))


@pytest.mark.parametrize("make", [make_file, Path.mkdir, os.mkfifo, make_link_to_dead_socket])
def test_existing_non_socket_path_is_refused_and_kept(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "socket"
    make(path)
    before = path.lstat()
    with pytest.raises(ConfigError, match=str(path)) as raised:
        unix.listen(str(path), MODE, BACKLOG)
    assert raised.value.code == "socket_path_taken"
    assert path.lstat() == before


def test_one_of_several_daemons_starting_at_a_dead_socket_wins(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    leave_dead_socket(path)
    together = threading.Barrier(STARTERS)
    won: list[socket.socket] = []
    lost: list[str] = []

    def start() -> None:
        together.wait()
        try:
            won.append(unix.listen(str(path), MODE, BACKLOG)[0])
        except ConfigError as error:
            lost.append(error.code)

    threads = [threading.Thread(target=start) for _ in range(STARTERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with won[0]:
        assert len(won) == 1
        assert lost == ["socket_in_use"] * (STARTERS - 1)
        assert answers(path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["socket"]


def test_live_socket_that_replaces_a_dead_one_during_the_check_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "socket"
    leave_dead_socket(path)
    other = socket.socket(socket.AF_UNIX)
    flock = fcntl.flock

    def take_place_first(directory: int, operation: int) -> None:
        path.unlink()
        other.bind(str(path))
        other.listen()
        flock(directory, operation)

    monkeypatch.setattr(fcntl, "flock", take_place_first)
    with other:
        with pytest.raises(ConfigError) as raised:
            unix.listen(str(path), MODE, BACKLOG)
        assert raised.value.code == "socket_in_use"
        assert answers(path)


def test_a_path_as_long_as_the_system_takes_works(tmp_path: Path) -> None:
    path = tmp_path / ("s" * (unix.PATH_BYTES_MAX - len(os.fsencode(tmp_path)) - 1))
    assert len(os.fsencode(path)) == unix.PATH_BYTES_MAX
    with listening(path):
        assert answers(path)


def test_too_long_path_is_a_config_error_with_its_length(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 60)
    with pytest.raises(ConfigError, match=str(len(os.fsencode(path)))) as raised:
        unix.listen(str(path), MODE, BACKLOG)
    assert raised.value.code == "socket_path_too_long"


async def test_a_path_too_long_to_dial_is_the_same_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        await unix.dial(str(tmp_path / ("s" * 108)))
    assert raised.value.code == "socket_path_too_long"


def test_a_missing_directory_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing") as raised:
        unix.listen(str(tmp_path / "missing" / "socket"), MODE, BACKLOG)
    assert raised.value.code == "socket_not_made"


def test_a_directory_that_may_not_be_written_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_sock: socket.socket, _path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError) as raised:
        unix.listen(str(tmp_path / "socket"), MODE, BACKLOG)
    assert raised.value.code == "socket_not_permitted"


def test_removing_deletes_the_own_socket_file(tmp_path: Path) -> None:
    with listening(tmp_path / "socket") as file:
        file.remove()
        assert not (tmp_path / "socket").exists()


def test_removing_leaves_a_socket_that_took_the_place(tmp_path: Path) -> None:
    with listening(tmp_path / "socket") as ours:
        (tmp_path / "socket").unlink()
        with listening(tmp_path / "socket"):
            ours.remove()
            assert answers(tmp_path / "socket")


def test_second_removal_of_a_socket_file_changes_nothing(tmp_path: Path) -> None:
    with listening(tmp_path / "socket") as file:
        file.remove()
        file.remove()


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_failed_connection_leaves_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()
    with pytest.raises(FileNotFoundError) as caught:
        await unix.dial(str(tmp_path / "missing"))
    # The traceback keeps the socket from being collected.
    assert caught.tb is not None
    assert descriptors() == before
