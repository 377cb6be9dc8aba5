from __future__ import annotations

from pathlib import Path

import pytest

from forged import mounts
from forged.mounts import KNOWN_S, Mounts, mount_of

LINES = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 0:5 / /mnt/a\\040b rw - nfs server:/a rw\n"


def test_path_lies_in_the_innermost_mount() -> None:
    points = ["/", "/ckpt", "/ckpt/nfs", "/ckpt/nfs2"]
    assert mount_of("/ckpt/nfs/run/a", points) == "/ckpt/nfs"
    assert mount_of("/ckpt/nfs3/run/a", points) == "/ckpt"
    assert mount_of("/home/run/a", points) == "/"
    assert mount_of("/home/run/a", []) == "/"


def test_list_is_read_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "MOUNTINFO", tmp_path / "mountinfo")
    now = [0.0]
    found = Mounts(lambda: now[0])
    assert found.of("/mnt/a b/run") == "/"
    (tmp_path / "mountinfo").write_text(LINES)
    assert found.of("/mnt/a b/run") == "/"
    now[0] = KNOWN_S
    assert found.of("/mnt/a b/run") == "/mnt/a b"
