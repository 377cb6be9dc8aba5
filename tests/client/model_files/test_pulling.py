"""Copies of a version's files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

import forged.checkpoint
from forged.checkpoint.ports import CancelToken
from forged.client.model_files import pulling
from forged.client.model_files.checkpoint_files import describe_checkpoint
from forged.client.model_files.comparison import compare, is_damage
from forged.client.model_files.description import ModelFiles
from forged.client.model_files.plain_files import checksum_of, describe_files
from forged.client.model_files.pulling import Pulled, pull
from forged.errors import ForgedError
from forged.registry.messages import Artifact, ArtifactFile, ArtifactState
from forged.registry.model import ModelMetadata, ModelVersion
from tests.client.model_files.test_plain_files import sha256, write

FILES = {"b/weights.bin": b"w" * 3_000_000, "a.json": b"{}", "b/empty": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", FILES)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def metadata_of(files: ModelFiles, model_id: str = "team/resnet") -> ModelMetadata:
    return ModelMetadata(model_id, "", ModelVersion(1, 2, 0), "", [], [], files.size_bytes, files.checksum)


def pulled(files: ModelFiles, target: Path | None = None, **options: Any) -> Pulled:
    return pull(metadata_of(files), files.artifact, target, CancelToken(), **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folder_is_copied_into_the_current_folder(folder: Path, here: Path) -> None:
    done = pulled(describe_files(folder, CancelToken()))
    assert (str(done.path), done.files, done.size_bytes) == ("resnet-1.2.0", 3, 3_000_002)
    assert contents(here / "resnet-1.2.0") == FILES
    assert list(here.iterdir()) == [here / "resnet-1.2.0"]


def test_file_is_copied_under_its_name(folder: Path, here: Path) -> None:
    done = pulled(describe_files(folder / "a.json", CancelToken()))
    assert (str(done.path), (here / "a.json").read_bytes()) == ("a.json", b"{}")


@pytest.mark.parametrize("path", [".bash_profile", "b/.profile"])
def test_registry_makes_no_hidden_file_in_the_current_folder(folder: Path, here: Path, path: str) -> None:
    files = describe_files(folder / "a.json", CancelToken())
    [file] = files.artifact.files
    artifact = replace(files.artifact, files=[replace(file, path=path)])
    assert str(pull(metadata_of(files), artifact, None, CancelToken()).path) == "resnet-1.2.0"
    assert contents(here) == {"resnet-1.2.0": b"{}"}


def test_file_is_copied_into_the_target_not_below_it(folder: Path, here: Path) -> None:
    files = describe_files(folder / "a.json", CancelToken())
    [file] = files.artifact.files
    artifact = replace(files.artifact, files=[replace(file, path=".ssh/tool")])
    assert str(pull(metadata_of(files), artifact, None, CancelToken()).path) == "tool"


def test_file_url_is_read_like_the_path(folder: Path, here: Path) -> None:
    files = describe_files(folder.rename(folder.with_name("a model")), CancelToken())
    artifact = replace(files.artifact, location=f"file://{quote(files.artifact.location)}")
    assert compare(metadata_of(files), artifact, CancelToken()).state is ArtifactState.SOUND
    assert pull(metadata_of(files), artifact, None, CancelToken()).files == 3


def test_copy_gets_the_name_that_is_given(folder: Path, here: Path) -> None:
    assert pulled(describe_files(folder, CancelToken()), here / "new" / "copy").path == here / "new" / "copy"
    assert contents(here / "new" / "copy") == FILES


def test_folder_that_ends_with_a_slash_is_made(folder: Path, here: Path) -> None:
    files = describe_files(folder / "a.json", CancelToken())
    assert pull(metadata_of(files), files.artifact, "new/", CancelToken()).path == Path("new/a.json")
    assert contents(here) == {"new/a.json": b"{}"}


def test_files_are_read_where_they_were_moved(folder: Path, here: Path) -> None:
    files = describe_files(folder, CancelToken())
    folder.rename(folder.with_name("moved"))
    with pytest.raises(ForgedError, match="does not exist"):
        pulled(files)
    assert list(here.iterdir()) == []
    assert pulled(files, location=str(folder.with_name("moved"))).files == 3


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_existing_target_is_not_replaced(folder: Path, here: Path, kind: str) -> None:
    target = here / "resnet-1.2.0"
    if kind == "link":
        target.symlink_to("nowhere")
    else:
        target.mkdir() if kind == "folder" else target.touch()
    with pytest.raises(ForgedError) as refused:
        pulled(describe_files(folder, CancelToken()), None)
    assert refused.value.code == "target_exists"
    assert list(here.iterdir()) == [target]


def test_target_that_appears_meanwhile_is_not_replaced(folder: Path, here: Path) -> None:
    def appear(done: int, total: int) -> None:
        (here / "copy").mkdir(exist_ok=True)

    with pytest.raises(ForgedError) as refused:
        pulled(describe_files(folder, CancelToken()), here / "copy", progress=appear)
    assert refused.value.code == "target_exists"
    assert contents(here) == {}


def test_damaged_file_leaves_no_copy(folder: Path, here: Path) -> None:
    files = describe_files(folder, CancelToken())
    write(folder, {"b/weights.bin": b"w" * 2_999_999 + b"x"})
    with pytest.raises(ForgedError, match="nothing was copied") as refused:
        pulled(files)
    assert is_damage(refused.value)
    assert list(here.iterdir()) == []


def test_grown_file_leaves_no_copy(folder: Path, here: Path) -> None:
    files = describe_files(folder, CancelToken())
    write(folder, {"a.json": b"{} "})
    with pytest.raises(ForgedError, match="it has 3 bytes, expected 2"):
        pulled(files)
    assert list(here.iterdir()) == []


def test_file_that_cannot_be_written_leaves_no_copy(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    files = describe_files(folder, CancelToken())
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ForgedError, match="No space left on device"):
        pulled(files)
    assert list(here.iterdir()) == []


def test_interrupted_copy_leaves_nothing(folder: Path, here: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pulled(describe_files(folder, CancelToken()), progress=interrupt)
    assert list(here.iterdir()) == []


def test_cancelled_copy_leaves_nothing(folder: Path, here: Path) -> None:
    files, token = describe_files(folder, CancelToken()), CancelToken()
    with pytest.raises(ForgedError, match="cancelled"):
        pull(metadata_of(files), files.artifact, None, token, lambda done, total: token.cancel())
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("path", ["../out", "/tmp/out", "a/../../out", "b\\..\\out"])
def test_path_that_leads_out_of_the_folder_is_refused(folder: Path, here: Path, path: str) -> None:
    files = [ArtifactFile(path, 2, sha256(b"{}"))]
    forged_one = ModelFiles(replace(describe_files(folder, CancelToken()).artifact, files=files), checksum_of(files), 2)
    with pytest.raises(ForgedError) as refused:
        pulled(forged_one)
    assert refused.value.code == "model_path_invalid"
    assert list(here.iterdir()) == []


def test_file_that_is_also_a_folder_is_refused(folder: Path, here: Path) -> None:
    described = describe_files(folder, CancelToken())
    files = [*described.artifact.files, ArtifactFile("a.json/inner", 0, sha256(b""))]
    with pytest.raises(ForgedError):
        pulled(ModelFiles(replace(described.artifact, files=files), checksum_of(files), 2))
    assert list(here.iterdir()) == []


def test_list_of_files_of_another_version_is_refused(folder: Path, here: Path) -> None:
    described = describe_files(folder, CancelToken())
    with pytest.raises(ForgedError, match="does not have the checksum"):
        pulled(ModelFiles(described.artifact, sha256(b"other"), 2))
    assert list(here.iterdir()) == []


def test_version_without_files_names_what_is_missing(folder: Path) -> None:
    described = describe_files(folder, CancelToken())
    with pytest.raises(ForgedError, match=r"does not know the files of team/resnet@1\.2\.0"):
        pulled(ModelFiles(replace(described.artifact, location=""), described.checksum, 2))


def test_version_with_a_place_and_no_list_of_files_names_the_place(folder: Path) -> None:
    described = describe_files(folder, CancelToken())
    with pytest.raises(ForgedError, match="it only knows that they are at /models/resnet"):
        pulled(ModelFiles(Artifact(location="/models/resnet"), described.checksum, 0))


@pytest.mark.parametrize(
    ("location", "code"), [("s3://bucket/model", "model_files_remote"), ("/no/such/place", "model_files_unreachable")]
)
def test_files_that_this_host_does_not_have_are_refused(folder: Path, location: str, code: str) -> None:
    described = describe_files(folder, CancelToken())
    with pytest.raises(ForgedError) as refused:
        pulled(ModelFiles(replace(described.artifact, location=location), described.checksum, 2))
    assert refused.value.code == code


# Checkpoints.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint."""
    place = tmp_path / "run" / "step-7"
    forged.checkpoint.save(place, {"model": {"w": np.arange(1000)}, "note": "hello"}, step=7)
    return place


def test_checkpoint_is_written_as_safetensors(saved: Path, here: Path) -> None:
    done = pulled(describe_checkpoint(saved, CancelToken()))
    assert str(done.path) == "resnet-1.2.0.safetensors"
    assert done.left_out == ("note",)
    assert load_file(here / "resnet-1.2.0.safetensors")["w"].tolist() == list(range(1000))


def test_checkpoint_in_a_folder_of_its_own_is_written_there(saved: Path, here: Path) -> None:
    assert pulled(describe_checkpoint(saved, CancelToken()), here / "copy.npz").path == here / "copy.npz"
    assert np.load(here / "copy.npz")["model/w"].shape == (1000,)


def test_another_checkpoint_under_the_name_leaves_no_copy(saved: Path, here: Path, tmp_path: Path) -> None:
    described = describe_checkpoint(saved, CancelToken())
    forged.checkpoint.save(tmp_path / "run" / "step-8", {"model": {"w": np.zeros(5)}})
    with pytest.raises(ForgedError) as refused:
        pulled(described, location=str(tmp_path / "run" / "step-8"))
    assert is_damage(refused.value)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("target", ["copy.safetensors", "copy.npz", "copy"])
def test_checkpoint_that_is_replaced_during_the_copy_leaves_no_copy(
    saved: Path, here: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    described = describe_checkpoint(saved, CancelToken())

    def replaced(*arguments: Any) -> Any:
        for path in [*saved.glob("*"), saved.with_name("step-7.metadata.json")]:
            path.unlink()
        forged.checkpoint.save(saved, {"model": {"w": np.zeros(5)}})
        return forged.checkpoint.convert(*arguments)

    monkeypatch.setattr(pulling, "convert", replaced)
    with pytest.raises(ForgedError, match="another checkpoint was saved there"):
        pulled(described, here / target)
    assert [path for path in here.rglob("*") if path.is_file()] == []


def test_damaged_checkpoint_leaves_no_copy(saved: Path, here: Path) -> None:
    described = describe_checkpoint(saved, CancelToken())
    [file] = saved.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ForgedError) as refused:
        pulled(described)
    assert is_damage(refused.value)
    assert list(here.iterdir()) == []
