"""`forgectl ckpt rm`: nobody's files are removed unasked."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from forged.cli.ckpt.rm import QUIET_S
from tests.cli.ckpt.conftest import STATE, Said, Shelf

A = "checkpoints/a"


class Keyboard(io.StringIO):
    """A terminal at which somebody types."""

    def isatty(self) -> bool:
        return True


@contextmanager
def typing(text: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", Keyboard(text))
        yield


def asked(shelf: Shelf, line: str, said: str) -> Said:
    with typing(said):
        return shelf.run(line)


def unfinished(shelf: Shelf, prefix: str, age_s: float = 0.0) -> None:
    """What a save has left that was ended so long ago."""
    shelf.put(prefix)
    shelf.manifest(prefix).unlink()
    for path in shelf.files(prefix):
        os.utime(path, (0, time.time() - age_s))


def half_deleted(shelf: Shelf, prefix: str) -> None:
    shelf.put(prefix)
    shelf.manifest(prefix).rename(shelf.folder / f"{prefix}.deleted.json")


def left(shelf: Shelf) -> list[str]:
    """What there still is."""
    return sorted(str(path.relative_to(shelf.folder)) for path in shelf.folder.rglob("*"))


class TestACheckpoint:
    @pytest.mark.parametrize("said", ["y\n", "Y\n", "yes\n"])
    def test_is_deleted_when_somebody_says_so(self, shelf: Shelf, said: str) -> None:
        shelf.put("a", STATE, STATE)
        done = asked(shelf, f"rm {A}", said)
        assert done.code == 0
        assert done.err.startswith(f"this deletes\n  the checkpoint a in {shelf.folder}: 2 files, ")
        assert done.err.endswith("go on? [y/N] ")
        assert done.out.startswith("a is deleted: 2 files, ")
        assert left(shelf) == []

    @pytest.mark.parametrize("said", ["n\n", "\n", "", "yess\n"])
    def test_stays_when_anything_else_is_said(self, shelf: Shelf, said: str) -> None:
        shelf.put("a")
        before = left(shelf)
        done = asked(shelf, f"rm {A}", said)
        assert (done.code, done.out) == (1, "nothing was deleted\n")
        assert left(shelf) == before

    def test_stays_where_nobody_can_be_asked(self, shelf: Shelf) -> None:
        shelf.put("a")
        before = left(shelf)
        code, error = shelf.failed(f"rm {A}")
        assert (code, error["kind"], error["code"]) == (2, "config", "consent_missing")
        assert left(shelf) == before

    def test_is_deleted_without_a_question_when_yes_was_said_before(self, shelf: Shelf) -> None:
        manifest = shelf.put("a")
        assert shelf.told(f"rm {A} --yes") == {
            "deleted": [{"prefix": "a", "what": "checkpoint", "files": 1, "size_bytes": manifest.size_bytes}],
            "spared": [],
        }
        assert left(shelf) == []

    def test_leaves_all_others(self, shelf: Shelf) -> None:
        for prefix in ("a", "a-b", "a/b", "b"):
            shelf.put(prefix)
        assert shelf.run(f"rm {A} -y").code == 0
        assert [row["prefix"] for row in shelf.told("ls")["checkpoints"]] == ["a-b", "a/b", "b"]
        assert shelf.run("verify checkpoints --all").code == 0

    def test_whose_manifest_is_damaged_can_be_deleted_and_that_is_told(self, shelf: Shelf) -> None:
        shelf.put("a")
        shelf.damage(shelf.manifest("a"), 10)
        done = asked(shelf, f"rm {A}", "y\n")
        assert done.code == 0
        assert "whose manifest cannot be read: 1 file, " in done.err
        assert left(shelf) == []

    def test_that_is_not_there_is_refused(self, shelf: Shelf) -> None:
        code, error = shelf.failed(f"rm {A} --yes")
        assert (code, error["code"]) == (3, "checkpoint_missing")


class TestADeletionThatWasInterrupted:
    def test_is_finished_without_a_question(self, shelf: Shelf) -> None:
        half_deleted(shelf, "a")
        done = shelf.run(f"rm {A}")
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith("a is deleted: 1 file, ")
        assert left(shelf) == []

    def test_is_finished_with_all_others_of_a_folder(self, shelf: Shelf) -> None:
        half_deleted(shelf, "a")
        half_deleted(shelf, "deep/b")
        shelf.put("c")
        told = shelf.told("rm --unfinished checkpoints")
        assert [(row["prefix"], row["what"]) for row in told["deleted"]] == [
            ("a", "half_deleted"), ("deep/b", "half_deleted"),
        ]  # fmt: skip
        assert [row["prefix"] for row in shelf.told("ls")["checkpoints"]] == ["c"]

    def test_is_finished_when_it_is_named_among_the_unfinished(self, shelf: Shelf) -> None:
        half_deleted(shelf, "a")
        assert shelf.told(f"rm --unfinished {A}")["deleted"][0]["what"] == "half_deleted"


class TestASaveThatCameToNothing:
    def test_has_to_be_meant(self, shelf: Shelf) -> None:
        unfinished(shelf, "a")
        before = left(shelf)
        code, error = shelf.failed(f"rm {A} --yes")
        assert (code, error["code"]) == (3, "checkpoint_unfinished")
        assert "a save is under way there, or one came to nothing" in error["message"]
        assert left(shelf) == before

    def test_goes_when_it_is_named_and_somebody_says_so(self, shelf: Shelf) -> None:
        unfinished(shelf, "a")
        done = asked(shelf, f"rm --unfinished {A}", "y\n")
        assert done.code == 0
        assert "without a manifest: 1 file, " in done.err
        assert left(shelf) == []

    def test_of_a_folder_those_go_that_nobody_can_be_at(self, shelf: Shelf) -> None:
        unfinished(shelf, "old", QUIET_S + 60)
        unfinished(shelf, "new", QUIET_S - 60)
        shelf.put("c")
        done = shelf.run("rm --unfinished checkpoints --yes")
        assert done.code == 0
        assert done.lines[0].startswith("old is deleted: 1 file, ")
        assert done.lines[1:] == ["new stays: name it to delete it, if no save is under way there"]
        told = shelf.told("ls")
        assert [row["prefix"] for row in told["unfinished"]] == ["new"]
        assert [row["prefix"] for row in told["checkpoints"]] == ["c"]

    def test_of_a_folder_is_asked_about(self, shelf: Shelf) -> None:
        unfinished(shelf, "old", QUIET_S + 60)
        assert shelf.failed("rm --unfinished checkpoints")[1]["code"] == "consent_missing"
        assert asked(shelf, "rm --unfinished checkpoints", "n\n").code == 1
        assert shelf.files("old")

    def test_of_whole_tensors_goes_unless_an_index_beside_it_may_be_somebody_elses(self, shelf: Shelf) -> None:
        for prefix in ("a", "b"):
            shelf.put("source")
            assert shelf.run(f"convert checkpoints/source checkpoints/{prefix} --format consolidated").code == 0
            shelf.run("rm checkpoints/source --yes")
            shelf.manifest(prefix).unlink()
        (shelf.folder / "a" / "model.safetensors.index.json").unlink()
        for path in [*shelf.files("a"), *shelf.files("b")]:
            os.utime(path, (0, 0))
        told = shelf.told("rm --unfinished checkpoints --yes")
        assert ([row["prefix"] for row in told["deleted"]], told["spared"]) == (["a"], ["b"])
        assert shelf.run("rm --unfinished checkpoints/b --yes").code == 0
        assert left(shelf) == []

    def test_is_not_what_somebody_else_has_put_there(self, shelf: Shelf) -> None:
        model = shelf.folder / "llama" / "model.safetensors.index.json"
        model.parent.mkdir(parents=True)
        model.write_bytes(b"x")
        os.utime(model, (0, 0))
        assert shelf.told("rm --unfinished checkpoints --yes") == {"deleted": [], "spared": ["llama"]}
        assert model.exists()

    def test_leaves_files_that_no_save_has_made(self, shelf: Shelf) -> None:
        unfinished(shelf, "a")
        (shelf.folder / "a" / "notes.txt").write_text("mine")
        assert shelf.run(f"rm --unfinished {A} --yes").code == 0
        assert left(shelf) == ["a", "a/notes.txt"]

    def test_is_none_where_there_is_a_checkpoint(self, shelf: Shelf) -> None:
        shelf.put("a")
        code, error = shelf.failed(f"rm --unfinished {A} --yes")
        assert (code, error["code"]) == (3, "checkpoint_finished")
        assert shelf.run(f"verify {A}").code == 0


def test_where_nothing_is_left_over_that_is_said(shelf: Shelf) -> None:
    shelf.put("a", {"w": np.zeros(1)})
    said = shelf.run("rm --unfinished checkpoints")
    assert (said.code, said.out) == (0, f"nothing to delete in {shelf.folder}\n")


def test_names_bring_nothing_that_a_terminal_would_obey(shelf: Shelf) -> None:
    folder = shelf.folder / "x\x1b[2J"
    folder.mkdir(parents=True)
    file = folder / "0123abcd.00000-of-00001.safetensors"
    file.write_bytes(b"x")
    os.utime(file, (0, 0))
    (shelf.folder / "y\x1b[2J.deleted.json").write_text("{}")
    said = shelf.run("rm --unfinished checkpoints --yes")
    assert (said.code, said.err) == (0, "")
    assert "\x1b" not in said.out
    assert [line.split(" ")[:2] for line in said.lines[1:]] == [["y\\x1b[2J", "stays:"], ["x\\x1b[2J", "stays:"]]
    assert file.exists()


def test_a_folder_that_leads_elsewhere_is_not_followed(shelf: Shelf, tmp_path: Path) -> None:
    shelf.put("a")
    outside = tmp_path / "outside"
    outside.mkdir()
    (shelf.folder / "link").symlink_to(outside)
    (outside / "0123abcd.00000-of-00001.safetensors").write_bytes(b"x")
    shelf.run("rm --unfinished checkpoints --yes")
    assert (outside / "0123abcd.00000-of-00001.safetensors").exists()
