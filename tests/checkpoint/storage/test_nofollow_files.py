"""A storage in which no link is followed, also while a tenant replaces its directories by links."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.storage.files import CREATE, READ, UNNAMED
from forged.checkpoint.storage.local import LocalStorage
from forged.checkpoint.storage.nofollow_files import NoFollowFiles
from tests.checkpoint.fixtures.sources import CopiedSource
from tests.checkpoint.fixtures.swapped_links import contents_of, swapped

ROUNDS = 300


def in_linked(directory: str) -> dict[str, Callable[[NoFollowFiles], object]]:
    """The operations on files and directories beneath a directory."""
    own = directory.replace("linked", "own")
    return {
        "read": lambda files: files.open(f"{directory}/a", READ),
        "create": lambda files: files.open(f"{directory}/new", CREATE),
        "create without a name": lambda files: files.open(directory, UNNAMED),
        "sync": lambda files: files.sync_directory(directory),
        "link": lambda files: files.link(f"{own}/a", f"{directory}/new"),
        "link of a linked one": lambda files: files.link(f"{directory}/a", f"{own}/new"),
        "rename": lambda files: files.rename(f"{own}/a", f"{directory}/new"),
        "rename of a linked one": lambda files: files.rename(f"{directory}/a", f"{own}/new"),
        "rename to a free name": lambda files: files.rename_new(f"{own}/a", f"{directory}/new"),
        "unlink": lambda files: files.unlink(f"{directory}/a"),
        "make a directory": lambda files: files.make_directory(f"{directory}/new"),
        "remove a directory": lambda files: files.remove_directory(f"{directory}/empty"),
        "scan": lambda files: files.scan(directory),
        "free bytes": lambda files: files.free_bytes(directory),
    }


@pytest.mark.parametrize("under", ["", "/inner"])
@pytest.mark.parametrize("name", in_linked(""))
def test_link_in_a_path_is_refused(tmp_path: Path, name: str, under: str) -> None:
    for directory in ("victim", "own"):
        (tmp_path / f"{directory}{under}" / "empty").mkdir(parents=True)
        (tmp_path / f"{directory}{under}" / "a").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "victim")
    before = contents_of(tmp_path)
    with pytest.raises(OSError, match=r".") as refused:
        in_linked(f"{tmp_path}/linked{under}")[name](NoFollowFiles())
    assert refused.value.errno in (errno.ELOOP, errno.ENOTDIR)
    assert contents_of(tmp_path) == before


def test_file_in_place_of_a_directory_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        NoFollowFiles().unlink(f"{tmp_path}/file/a")
    with pytest.raises(OSError, match="Invalid argument"):
        NoFollowFiles().unlink(f"{tmp_path}/../file")


def test_link_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(tmp_path)
    with pytest.raises(CheckpointException) as refused:
        LocalStorage(tmp_path / "linked").without_links().publish("p/a", b"")
    assert refused.value.code == "checkpoint_storage_obstructed"
    assert refused.value.fix == "replace the symbolic link by what it leads to"


def test_nothing_is_written_or_deleted_where_a_swapped_link_leads(tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    for number in range(ROUNDS):
        (victim / f"{number}").mkdir(parents=True)
        (victim / f"{number}" / "part").write_bytes(b"precious")
        (victim / f"{number}.json").write_bytes(b"precious")
    before = contents_of(victim)
    storage, published = LocalStorage(run).without_links(), 0
    with swapped(run, victim):
        for number in range(ROUNDS):
            with suppress(CheckpointException):
                storage.write(f"new-{number}/part", CopiedSource(b"hello"), CancelToken())
            with suppress(CheckpointException):
                storage.publish(f"new-{number}.json", b"{}")
                published += 1
            with suppress(CheckpointException):
                storage.move(f"{number}.json", f"{number}.tombstone")
            with suppress(CheckpointException):
                storage.delete([f"{number}/part", f"{number}.json"])
    assert contents_of(victim) == before
    assert published
