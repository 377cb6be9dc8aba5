"""Plain files of a model."""

from __future__ import annotations

import hashlib
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from forged.checkpoint.ports import CancelToken
from forged.client.model_files import plain_files
from forged.client.model_files.comparison import compare
from forged.client.model_files.description import ModelFiles
from forged.client.model_files.plain_files import check_path, checksum_of, compare_files, describe_files
from forged.errors import ConfigError, ForgedError
from forged.registry.messages import Artifact, ArtifactFile, ArtifactState
from forged.registry.model import ModelMetadata, ModelVersion


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """A folder with these files."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", {"b/weights.bin": b"w" * 3_000_000, "a.json": b"{}", "b/empty": b""})


def test_checksum_of_one_file_is_its_sha256(tmp_path: Path) -> None:
    file = write(tmp_path, {"model.onnx": b"bytes"}) / "model.onnx"
    found = describe_files(file, CancelToken())
    assert (found.checksum, found.size_bytes) == (sha256(b"bytes"), 5)
    assert found.artifact == Artifact(location=str(file), files=[ArtifactFile("model.onnx", 5, sha256(b"bytes"))])


def test_checksum_of_a_folder_covers_paths_sizes_and_checksums_in_order(folder: Path) -> None:
    found = describe_files(folder, CancelToken())
    weights = sha256(b"w" * 3_000_000)
    lines = f"a.json 2 {sha256(b'{}')}\nb/empty 0 {sha256(b'')}\nb/weights.bin 3000000 {weights}\n"
    assert found.checksum == sha256(lines.encode())
    assert found.size_bytes == 3_000_002
    assert [file.path for file in found.artifact.files] == ["a.json", "b/empty", "b/weights.bin"]
    assert found.artifact.location == str(folder)


def test_folder_with_one_file_is_told_from_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {"a": b"bytes"})
    one, whole = describe_files(folder / "a", CancelToken()), describe_files(folder, CancelToken())
    assert one.checksum != whole.checksum
    assert plain_files.is_one_file(one.artifact, one.checksum)
    assert not plain_files.is_one_file(whole.artifact, whole.checksum)


def test_checksum_does_not_depend_on_the_order_of_the_files() -> None:
    files = [ArtifactFile(path, 1, sha256(path.encode())) for path in "abcdefgh"]
    shuffled = random.Random(1).sample(files, len(files))
    assert checksum_of(files) == checksum_of(shuffled)


def test_progress_reaches_the_total(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    describe_files(folder, CancelToken(), lambda done, total: told.append((done, total)))
    assert told[-1] == (3_000_002, 3_000_002)
    assert len(told) > 2


LONG = "y" * 300
"""A name that no file system takes, so that it cannot be looked at."""


@pytest.mark.parametrize("path", [LONG, f"{LONG}/weights"])
def test_path_that_cannot_be_looked_at_is_neither_described_nor_missing(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="File name too long"):
        describe_files(tmp_path / path, CancelToken())
    artifact = Artifact(str(tmp_path / path), files=[ArtifactFile("weights", 5, sha256(b"bytes"))])
    metadata = ModelMetadata("resnet", "", ModelVersion(1, 0, 0), "", [], [], 5, sha256(b"bytes"))
    with pytest.raises(ConfigError, match="File name too long"):
        compare(metadata, artifact, CancelToken())


def test_link_to_a_file_stands_for_the_file(tmp_path: Path) -> None:
    write(tmp_path / "blobs", {"0a1b": b"bytes"})
    folder = write(tmp_path / "snapshot", {"config.json": b"{}"})
    (folder / "weights").symlink_to("../blobs/0a1b")
    (tmp_path / "link").symlink_to("blobs/0a1b")
    found = describe_files(folder, CancelToken())
    assert [file.size_bytes for file in found.artifact.files] == [2, 5]
    assert describe_files(tmp_path / "link", CancelToken()).artifact.location == str(tmp_path / "link")


def linked_folder(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "b")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def unix_socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))


def many(folder: Path) -> None:
    write(folder, {f"{number}": b"" for number in range(5)})


def emptied(folder: Path) -> None:
    for path in ("a.json", "b/empty", "b/weights.bin"):
        (folder / path).unlink()


def strange_name(folder: Path) -> None:
    write(folder, {"line\nbreak": b""})


def without_utf8(folder: Path) -> None:
    (folder / os.fsdecode(b"\xff")).write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (linked_folder, "model_files_linked"),
        (pipe, "model_file_special"),
        (unix_socket, "model_file_special"),
        (many, "model_files_many"),
        (emptied, "model_files_missing"),
        (strange_name, "model_path_invalid"),
        (without_utf8, "model_path_invalid"),
    ],
)
def test_folder_that_cannot_be_registered_is_refused(
    folder: Path, change: Callable[[Path], None], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_files, "FILES_MAX", 7)
    change(folder)
    with pytest.raises(ForgedError) as refused:
        describe_files(folder, CancelToken())
    assert refused.value.code == code


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgedError, match="none does not exist"):
        describe_files(tmp_path / "none", CancelToken())


def test_file_that_changes_while_it_is_read_is_refused(folder: Path) -> None:
    def append(done: int, total: int) -> None:
        with (folder / "b" / "weights.bin").open("ab") as file:
            file.write(b"more")

    with pytest.raises(ForgedError, match="changed while it was read"):
        describe_files(folder, CancelToken(), append)


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../up", "a/../b", "a//b", "./a", "a/.", "a\\b", "a\0b", "a\nb", "a/" + "b" * 256,
     "a/" * 501 + "a", "..", "a/..", "\u202ea"],
)  # fmt: skip
def test_unsafe_path_is_refused(path: str) -> None:
    with pytest.raises(ForgedError) as refused:
        check_path(path)
    assert refused.value.code == "model_path_invalid"


@pytest.mark.parametrize("path", ["a", "a/b.c", ".hidden", "...", "ä/ß", "a b", "a..b"])
def test_safe_path_is_accepted(path: str) -> None:
    assert check_path(path) == path


def compared(folder: Path, registered: ModelFiles) -> plain_files.FilesVerdict:
    return compare_files(registered.artifact, registered.checksum, str(folder), CancelToken())


def test_untouched_files_are_sound(folder: Path) -> None:
    registered = describe_files(folder, CancelToken())
    assert compared(folder, registered) == (ArtifactState.SOUND, "", 3_000_002)
    write(folder, {"another": b""})
    assert compared(folder, registered).state is ArtifactState.SOUND


def test_changed_byte_is_damage(folder: Path) -> None:
    registered = describe_files(folder, CancelToken())
    changed = b"w" * 2_999_999 + b"x"
    write(folder, {"b/weights.bin": changed})
    found = compared(folder, registered)
    assert found.state is ArtifactState.DAMAGED
    assert "1 of 3 files differ: b/weights.bin: its checksum is not sha256:" in found.problem
    # The tenant that registered the version may have named a file that it cannot read.
    assert sha256(changed) not in found.problem


def test_every_file_that_differs_is_counted(folder: Path) -> None:
    registered = describe_files(folder, CancelToken())
    (folder / "a.json").unlink()
    write(folder, {"b/empty": b"not"})
    assert compared(folder, registered).problem == (
        "2 of 3 files differ: a.json: it does not exist; b/empty: it has 3 bytes, expected 0"
    )


def test_folder_that_is_gone_is_missing(folder: Path) -> None:
    registered = describe_files(folder, CancelToken())
    folder.rename(folder.with_name("moved"))
    assert compared(folder, registered).state is ArtifactState.MISSING
    assert compared(folder.with_name("moved"), registered).state is ArtifactState.SOUND


def test_list_of_files_that_is_not_that_of_the_version_is_damage(folder: Path) -> None:
    registered = describe_files(folder, CancelToken())
    found = compare_files(registered.artifact, sha256(b"other"), str(folder), CancelToken())
    assert found.state is ArtifactState.DAMAGED
    assert "does not have the checksum" in found.problem


def test_cancelled_comparison_ends(folder: Path) -> None:
    registered, token = describe_files(folder, CancelToken()), CancelToken()
    token.cancel()
    with pytest.raises(ForgedError, match="cancelled"):
        compare_files(registered.artifact, registered.checksum, str(folder), token)
