from __future__ import annotations

import pytest

from forged.catalog.errors import CheckpointInvalid
from forged.catalog.records import checked_checkpoint_path, folder_of, root_of, storage_kind


@pytest.mark.parametrize(
    ("path", "folder", "kind"),
    [
        ("/a/step-1", "/a", "local"),
        ("/step-1", "/", "local"),
        ("file:///a/step-1", "file:///a", "local"),
        ("s3://bucket/step-1", "s3://bucket", "s3"),
        ("gs://bucket/run/step-1", "gs://bucket/run", "gs"),
        ("memory://name/step-1", "memory://name", "memory"),
        ("/a/..b/c.d/step-1", "/a/..b/c.d", "local"),
    ],
)
def test_path_has_a_folder_and_a_kind_of_storage(path: str, folder: str, kind: str) -> None:
    assert checked_checkpoint_path(path) == path
    assert (folder_of(path), storage_kind(path)) == (folder, kind)


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "a", "a/b", "/a/", "//a", "/a//b", "/a/./b", "/a/../b", "/a\n", "/a\x00b", "~/a", "C:\\a"),
        *("ftp://h/a", "s3://", "s3://b", "file://host/a", "file:///", "s3://b//a", "s3://b/a/", "s3:/b/a"),
        "/" + "x" * 4096,
    ],
)
def test_other_spellings_are_refused(path: str) -> None:
    with pytest.raises(CheckpointInvalid):
        checked_checkpoint_path(path)


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/ckpt/run/a", "/ckpt/run"),
        ("/ckpt/run/deep/a", "/ckpt/run"),
        ("/ckpt/runner/a", None),
        ("/ckpt/run", None),
        ("/ckpt/other/a", None),
        ("s3://bucket/all/a", "s3://bucket/all"),
        ("s3://bucket/allover/a", None),
    ],
)
def test_root_of_a_path_is_the_one_of_its_job(path: str, root: str | None) -> None:
    assert root_of(path, ("/ckpt/{job}", "s3://bucket/all/"), "run") == root
