"""`forgectl ckpt rm` deletes only what is named and confirmed."""

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
from forged.cli.process import EXIT_REFUSED
from tests.cli.ckpt.conftest import STATE, CheckpointFolder, Output

A = "checkpoints/a"


class Keyboard(io.StringIO):
    """A terminal with typed input."""

    def isatty(self) -> bool:
        return True


@contextmanager
def typing(text: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", Keyboard(text))
        yield


def asked(checkpoint_folder: CheckpointFolder, line: str, output: str) -> Output:
    with typing(output):
        return checkpoint_folder.run(line)


def unfinished(checkpoint_folder: CheckpointFolder, prefix: str, age_s: float = 0.0) -> None:
    """Files of a save that failed so long ago."""
    checkpoint_folder.save(prefix)
    checkpoint_folder.manifest(prefix).unlink()
    for path in checkpoint_folder.files(prefix):
        os.utime(path, (0, time.time() - age_s))


def half_deleted(checkpoint_folder: CheckpointFolder, prefix: str) -> None:
    checkpoint_folder.save(prefix)
    checkpoint_folder.manifest(prefix).rename(checkpoint_folder.folder / f"{prefix}.deleted.json")


def left(checkpoint_folder: CheckpointFolder) -> list[str]:
    """The remaining files."""
    return sorted(str(path.relative_to(checkpoint_folder.folder)) for path in checkpoint_folder.folder.rglob("*"))


class TestCheckpoint:
    @pytest.mark.parametrize("answer", ["y\n", "Y\n", "yes\n"])
    def test_is_deleted_after_confirmation(self, checkpoint_folder: CheckpointFolder, answer: str) -> None:
        checkpoint_folder.save("a", STATE, STATE)
        done = asked(checkpoint_folder, f"rm {A}", answer)
        assert done.code == 0
        assert done.err.startswith(f"this deletes\n  checkpoint a in {checkpoint_folder.folder}: 2 files, ")
        assert done.err.endswith("continue? [y/N] ")
        assert done.out.startswith("deleted a: 2 files, ")
        assert left(checkpoint_folder) == []

    @pytest.mark.parametrize("answer", ["n\n", "\n", "", "yess\n"])
    def test_is_kept_after_any_other_answer(self, checkpoint_folder: CheckpointFolder, answer: str) -> None:
        checkpoint_folder.save("a")
        before = left(checkpoint_folder)
        done = asked(checkpoint_folder, f"rm {A}", answer)
        assert (done.code, done.out) == (1, "nothing deleted\n")
        assert left(checkpoint_folder) == before

    def test_is_kept_without_a_terminal(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a")
        before = left(checkpoint_folder)
        code, error = checkpoint_folder.run_failing(f"rm {A}")
        assert (code, error["kind"], error["code"]) == (2, "config", "consent_missing")
        assert left(checkpoint_folder) == before

    def test_is_deleted_without_confirmation_with_yes(self, checkpoint_folder: CheckpointFolder) -> None:
        manifest = checkpoint_folder.save("a")
        assert checkpoint_folder.run_json(f"rm {A} --yes") == {
            "deleted": [{"prefix": "a", "what": "checkpoint", "files": 1, "size_bytes": manifest.size_bytes}],
            "kept": [],
        }
        assert left(checkpoint_folder) == []

    def test_deletion_leaves_other_checkpoints(self, checkpoint_folder: CheckpointFolder) -> None:
        for prefix in ("a", "a-b", "a/b", "b"):
            checkpoint_folder.save(prefix)
        assert checkpoint_folder.run(f"rm {A} -y").code == 0
        assert [row["prefix"] for row in checkpoint_folder.run_json("ls")["checkpoints"]] == ["a-b", "a/b", "b"]
        assert checkpoint_folder.run("verify checkpoints --all").code == 0

    def test_with_a_corrupt_manifest_can_be_deleted(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a")
        checkpoint_folder.flip_bit(checkpoint_folder.manifest("a"), 10)
        done = asked(checkpoint_folder, f"rm {A}", "y\n")
        assert done.code == 0
        assert "(unreadable manifest): 1 file, " in done.err
        assert left(checkpoint_folder) == []

    def test_a_missing_one_is_refused(self, checkpoint_folder: CheckpointFolder) -> None:
        code, error = checkpoint_folder.run_failing(f"rm {A} --yes")
        assert (code, error["code"]) == (3, "checkpoint_missing")


class TestInterruptedDeletion:
    def test_is_finished_without_confirmation(self, checkpoint_folder: CheckpointFolder) -> None:
        half_deleted(checkpoint_folder, "a")
        done = checkpoint_folder.run(f"rm {A}")
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith("deleted a: 1 file, ")
        assert left(checkpoint_folder) == []

    def test_is_finished_for_a_whole_folder(self, checkpoint_folder: CheckpointFolder) -> None:
        half_deleted(checkpoint_folder, "a")
        half_deleted(checkpoint_folder, "deep/b")
        checkpoint_folder.save("c")
        result = checkpoint_folder.run_json("rm --unfinished checkpoints")
        assert [(row["prefix"], row["what"]) for row in result["deleted"]] == [
            ("a", "half_deleted"), ("deep/b", "half_deleted"),
        ]  # fmt: skip
        assert [row["prefix"] for row in checkpoint_folder.run_json("ls")["checkpoints"]] == ["c"]

    def test_is_finished_when_named_with_unfinished(self, checkpoint_folder: CheckpointFolder) -> None:
        half_deleted(checkpoint_folder, "a")
        assert checkpoint_folder.run_json(f"rm --unfinished {A}")["deleted"][0]["what"] == "half_deleted"


class TestFailedSave:
    def test_needs_the_unfinished_option(self, checkpoint_folder: CheckpointFolder) -> None:
        unfinished(checkpoint_folder, "a")
        before = left(checkpoint_folder)
        code, error = checkpoint_folder.run_failing(f"rm {A} --yes")
        assert (code, error["code"]) == (3, "checkpoint_unfinished")
        assert "a save is running there, or failed" in error["message"]
        assert left(checkpoint_folder) == before

    def test_is_deleted_when_named_and_confirmed(self, checkpoint_folder: CheckpointFolder) -> None:
        unfinished(checkpoint_folder, "a")
        done = asked(checkpoint_folder, f"rm --unfinished {A}", "y\n")
        assert done.code == 0
        assert "1 file, " in done.err
        assert left(checkpoint_folder) == []

    def test_in_a_folder_only_old_ones_are_deleted(self, checkpoint_folder: CheckpointFolder) -> None:
        unfinished(checkpoint_folder, "old", QUIET_S + 60)
        unfinished(checkpoint_folder, "new", QUIET_S - 60)
        checkpoint_folder.save("c")
        done = checkpoint_folder.run("rm --unfinished checkpoints --yes")
        assert done.code == 0
        assert done.lines[0].startswith("deleted old: 1 file, ")
        assert done.lines[1:] == ["kept new: if no save is running there, name it to delete it"]
        result = checkpoint_folder.run_json("ls")
        assert [row["prefix"] for row in result["unfinished"]] == ["new"]
        assert [row["prefix"] for row in result["checkpoints"]] == ["c"]

    def test_in_a_folder_needs_confirmation(self, checkpoint_folder: CheckpointFolder) -> None:
        unfinished(checkpoint_folder, "old", QUIET_S + 60)
        assert checkpoint_folder.run_failing("rm --unfinished checkpoints")[1]["code"] == "consent_missing"
        assert asked(checkpoint_folder, "rm --unfinished checkpoints", "n\n").code == 1
        assert checkpoint_folder.files("old")

    def test_in_consolidated_layout_is_kept_with_an_index_of_another_tool(
        self, checkpoint_folder: CheckpointFolder
    ) -> None:
        for prefix in ("a", "b"):
            checkpoint_folder.save("source")
            assert (
                checkpoint_folder.run(f"convert checkpoints/source checkpoints/{prefix} --format consolidated").code
                == 0
            )
            checkpoint_folder.run("rm checkpoints/source --yes")
            checkpoint_folder.manifest(prefix).unlink()
        (checkpoint_folder.folder / "a" / "model.safetensors.index.json").unlink()
        for path in [*checkpoint_folder.files("a"), *checkpoint_folder.files("b")]:
            os.utime(path, (0, 0))
        result = checkpoint_folder.run_json("rm --unfinished checkpoints --yes")
        assert ([row["prefix"] for row in result["deleted"]], result["kept"]) == (["a"], ["b"])
        assert checkpoint_folder.run("rm --unfinished checkpoints/b --yes").code == 0
        assert left(checkpoint_folder) == []

    def test_files_of_another_tool_are_kept(self, checkpoint_folder: CheckpointFolder) -> None:
        model = checkpoint_folder.folder / "llama" / "model.safetensors.index.json"
        model.parent.mkdir(parents=True)
        model.write_bytes(b"x")
        os.utime(model, (0, 0))
        assert checkpoint_folder.run_json("rm --unfinished checkpoints --yes") == {"deleted": [], "kept": ["llama"]}
        assert model.exists()

    def test_files_that_no_save_names_are_kept(self, checkpoint_folder: CheckpointFolder) -> None:
        unfinished(checkpoint_folder, "a")
        (checkpoint_folder.folder / "a" / "notes.txt").write_text("mine")
        assert checkpoint_folder.run(f"rm --unfinished {A} --yes").code == 0
        assert left(checkpoint_folder) == ["a", "a/notes.txt"]

    def test_a_checkpoint_is_refused(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a")
        code, error = checkpoint_folder.run_failing(f"rm --unfinished {A} --yes")
        assert (code, error["code"]) == (3, "checkpoint_finished")
        assert checkpoint_folder.run(f"verify {A}").code == 0


def test_a_folder_without_leftovers_is_reported(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {"w": np.zeros(1)})
    output = checkpoint_folder.run("rm --unfinished checkpoints")
    assert (output.code, output.out) == (0, f"nothing to delete in {checkpoint_folder.folder}\n")


def test_control_characters_are_escaped(checkpoint_folder: CheckpointFolder) -> None:
    folder = checkpoint_folder.folder / "x\x1b[2J"
    folder.mkdir(parents=True)
    file = folder / "0123abcd.00000-of-00001.safetensors"
    file.write_bytes(b"x")
    os.utime(file, (0, 0))
    (checkpoint_folder.folder / "y\x1b[2J.deleted.json").write_text("{}")
    output = checkpoint_folder.run("rm --unfinished checkpoints --yes")
    assert (output.code, output.err) == (0, "")
    assert "\x1b" not in output.out
    assert [line.split(":")[0] for line in output.lines[1:]] == ["kept y\\x1b[2J", "kept x\\x1b[2J"]
    assert file.exists()


def test_a_symlinked_folder_is_not_followed(checkpoint_folder: CheckpointFolder, tmp_path: Path) -> None:
    checkpoint_folder.save("a")
    outside = tmp_path / "outside"
    outside.mkdir()
    (checkpoint_folder.folder / "link").symlink_to(outside)
    (outside / "0123abcd.00000-of-00001.safetensors").write_bytes(b"x")
    checkpoint_folder.run("rm --unfinished checkpoints --yes")
    assert (outside / "0123abcd.00000-of-00001.safetensors").exists()


class TestNeeded:
    def test_is_refused_with_the_names_of_those_that_need_it(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save_chain("a", "b", "c")
        code, error = checkpoint_folder.run_failing("rm checkpoints/a --yes")
        assert code == EXIT_REFUSED
        assert (error["code"], error["message"]) == ("checkpoint_needed", "checkpoint a is needed by b, c")
        assert checkpoint_folder.run("verify checkpoints --all").code == 0

    def test_force_deletes_it_and_says_what_is_lost(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save_chain("a", "b")
        output = asked(checkpoint_folder, "rm checkpoints/a --force", "y\n")
        assert output.code == 0
        assert "then b cannot be restored" in output.err
        output = checkpoint_folder.run("verify checkpoints/b")
        assert output.code == 1
        assert "checkpoint b needs a: that was deleted" in output.out

    def test_chain_is_deleted_from_its_end(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save_chain("a", "b", "c")
        for prefix in ("c", "b", "a"):
            assert checkpoint_folder.run(f"rm checkpoints/{prefix} --yes").code == 0
        assert left(checkpoint_folder) == []
