"""`forgectl ckpt ls`: what is there, and what is not."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from forged.checkpoint.model import CompressionLevel
from tests.cli.ckpt.conftest import STATE, Shelf


def test_each_checkpoint_is_a_line_the_newest_last(shelf: Shelf) -> None:
    now = time.time()
    shelf.put("b", STATE, STATE, created_at=now - 7200)
    shelf.put("a", created_at=now - 90, level=CompressionLevel.FAST)
    said = shelf.run("ls")
    assert (said.code, said.err) == (0, "")
    head, older, newer = said.lines
    assert head.split() == ["prefix", "created", "age", "step", "ranks", "layout", "compression", "size", "job"]
    assert older.split()[0] == "b"
    assert "2h00m" in older
    assert newer.split()[0] == "a"
    assert "1m30s" in newer
    assert "fast" in newer


def test_without_a_folder_it_is_the_one_where_they_are_by_default(shelf: Shelf) -> None:
    shelf.put("a")
    assert shelf.run("") == shelf.run("ls") == shelf.run("ls checkpoints") == shelf.run("list ./checkpoints/")


def test_those_in_deeper_folders_are_there_whatever_they_were_called_from(shelf: Shelf) -> None:
    shelf.put("run-7/step-1")
    told = shelf.told("ls .")
    assert [row["prefix"] for row in told["checkpoints"]] == ["checkpoints/run-7/step-1"]
    assert shelf.told("ls checkpoints/run-7")["checkpoints"][0]["prefix"] == "step-1"


def test_programs_are_told_all_of_it(shelf: Shelf) -> None:
    manifest = shelf.put("a", created_at=5.0)
    assert shelf.told("ls") == {
        "url": str(shelf.folder),
        "checkpoints": [
            {
                "prefix": "a", "created_at": 5.0, "step": None, "job": None, "world_size": 1, "layout": "multi_shard",
                "compression": "none", "size_bytes": manifest.size_bytes, "tensors": 2, "version": "1.0", "fence": None,
            }
        ],
        "broken": [], "unfinished": [], "half_deleted": [],
    }  # fmt: skip


@pytest.mark.parametrize("where", ["", "checkpoints", "/nowhere/at/all", "file:///nowhere"])
def test_where_nothing_is_it_says_where_it_looked(shelf: Shelf, where: str) -> None:
    said = shelf.run(f"ls {where}")
    assert said.code == 0
    assert said.out.startswith("no checkpoints in /")


def test_a_manifest_that_cannot_be_read_is_told_with_the_reason_and_fails(shelf: Shelf) -> None:
    shelf.put("good")
    shelf.put("bad")
    shelf.damage(shelf.manifest("bad"), 40)
    said = shelf.run("ls")
    assert said.code == 1
    assert "good" in said.lines[1]
    assert said.lines[-1] == "bad cannot be read: bad.metadata.json is corrupt: its checksum differs"
    told = shelf.told("ls", code=1)
    assert [(row["prefix"], row["code"]) for row in told["broken"]] == [("bad", "checkpoint_manifest_corrupt")]


def test_a_manifest_of_a_later_version_is_told_as_such(shelf: Shelf) -> None:
    shelf.put("a")
    text = shelf.manifest("a").read_text().replace('"version":"1.0"', '"version":"2.0"')
    body = text.rpartition(',"checksum"')[0].encode()
    import xxhash

    shelf.manifest("a").write_bytes(body + b',"checksum":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode())
    said = shelf.run("ls")
    assert said.code == 1
    assert "has version 2.0, and this is 1.0" in said.out


def test_files_without_a_manifest_are_told_with_what_to_do(shelf: Shelf) -> None:
    shelf.put("a")
    shelf.manifest("a").unlink()
    [file] = shelf.files("a")
    os.utime(file, (0, time.time() - 7200))
    said = shelf.run("ls")
    assert said.code == 0
    assert said.lines[0] == f"no checkpoints in {shelf.folder}"
    assert said.lines[2].startswith("a is no checkpoint (1 file, ")
    assert "written 2h00m ago): a save under way, or one that came to nothing;" in said.lines[2]
    [row] = shelf.told("ls")["unfinished"]
    assert (row["prefix"], row["files"], row["size_bytes"], row["of_a_save"]) == ("a", 1, file.stat().st_size, True)


def test_a_model_that_somebody_put_there_is_not_taken_for_a_save(shelf: Shelf) -> None:
    (shelf.folder / "llama").mkdir(parents=True)
    (shelf.folder / "llama" / "model.safetensors.index.json").write_bytes(b"x")
    said = shelf.run("ls")
    assert "llama has no manifest (1 file, 1 B, written moments ago)" in said.out
    assert "or a model from elsewhere" in said.out
    assert shelf.told("ls")["unfinished"][0]["of_a_save"] is False


def test_what_is_half_deleted_is_no_checkpoint(shelf: Shelf) -> None:
    shelf.put("a")
    shelf.manifest("a").rename(shelf.folder / "a.deleted.json")
    said = shelf.run("ls")
    assert said.lines[-1] == "a is half deleted: `forgectl ckpt rm` finishes that"
    assert shelf.told("ls")["half_deleted"] == [{"prefix": "a"}]


def test_names_bring_nothing_that_a_terminal_would_obey(shelf: Shelf) -> None:
    shelf.put("a", {"w": np.zeros(1)})
    (shelf.folder / "b\x1b[2J.metadata.json").write_text("{}")
    said = shelf.run("ls")
    assert said.code == 1
    assert "\x1b" not in said.out
    assert "b\\x1b[2J cannot be read" in said.out


def test_on_a_narrow_terminal_cells_are_cut(shelf: Shelf) -> None:
    shelf.put("a-name-of-some-length-that-nobody-would-give", created_at=time.time() - 5)
    said = shelf.on_a_terminal("ls", columns=80)
    assert max(map(len, said.lines)) <= 80
    assert "…" in said.out


def test_an_address_that_leads_nowhere_is_a_mistake(shelf: Shelf) -> None:
    code, error = shelf.failed("ls ftp://host/x")
    assert (code, error["kind"], error["code"]) == (2, "config", "checkpoint_location_invalid")
