"""The file of a backup."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from forged.cli.forgectl.commands.backup import write_whole
from forged.errors import ForgedError, Unavailable


@pytest.fixture(autouse=True)
def zero_umask() -> Iterator[None]:
    """Clear the umask, so that only the explicit mode restricts access."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def interrupted_pieces() -> Iterator[bytes]:
    yield b"half"
    raise Unavailable("connection_lost", "the daemon is gone")


def test_backup_is_complete_and_private(tmp_path: Path) -> None:
    write_whole(str(tmp_path / "copy"), [b"one", b"two"])
    assert (tmp_path / "copy").read_bytes() == b"onetwo"
    assert mode(tmp_path / "copy") == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_backup_is_private_while_it_is_written(tmp_path: Path) -> None:
    modes: list[int] = []

    def pieces() -> Iterator[bytes]:
        modes.extend(mode(path) for path in tmp_path.iterdir())
        yield b"all"

    write_whole(str(tmp_path / "copy"), pieces())
    assert modes == [0o600]


@pytest.mark.parametrize("name", ["copy", "copy.part"])
def test_backup_replaces_a_readable_file_with_a_private_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"old")
    (tmp_path / name).chmod(0o666)
    write_whole(str(tmp_path / "copy"), [b"new"])
    assert (tmp_path / "copy").read_bytes() == b"new"
    assert mode(tmp_path / "copy") == 0o600


def test_interrupted_backup_leaves_the_existing_file(tmp_path: Path) -> None:
    (tmp_path / "copy").write_bytes(b"old")
    with pytest.raises(Unavailable):
        write_whole(str(tmp_path / "copy"), interrupted_pieces())
    assert (tmp_path / "copy").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_unwritable_path_raises_backup_failed(tmp_path: Path) -> None:
    with pytest.raises(ForgedError, match="No such file") as failed:
        write_whole(str(tmp_path / "none" / "copy"), [b"x"])
    assert failed.value.code == "backup_failed"


def test_mode_and_error_code_can_be_chosen(tmp_path: Path) -> None:
    write_whole(str(tmp_path / "array"), [memoryview(b"one")], mode=0o666)
    assert mode(tmp_path / "array") == 0o666
    with pytest.raises(ForgedError) as caught:
        write_whole(str(tmp_path / "nowhere" / "array"), [], code="file_unwritable")
    assert caught.value.code == "file_unwritable"
