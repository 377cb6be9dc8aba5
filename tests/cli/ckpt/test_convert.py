"""`forgectl ckpt convert`: the same in another form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from forged.checkpoint import load
from forged.checkpoint.model import ShardedArray
from tests.cli.ckpt.conftest import STATE, Shelf

A = "checkpoints/a"


@pytest.mark.parametrize("format", ["multi_shard", "single_file", "consolidated"])
@pytest.mark.parametrize("compression", ["none", "fast"])
def test_a_checkpoint_becomes_one_of_another_format(shelf: Shelf, format: str, compression: str) -> None:  # noqa: A002
    shelf.put("a", STATE, STATE)
    said = shelf.run(f"convert {A} checkpoints/b --format {format} --compression {compression}")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("checkpoints/b has 2 tensors, ")
    assert len(said.lines) == 1
    [row] = [row for row in shelf.told("ls")["checkpoints"] if row["prefix"] == "b"]
    assert (row["layout"], row["compression"]) == (format, compression)
    assert shelf.run(f"diff {A} checkpoints/b").code == 0


def test_programs_are_told_what_came_of_it(shelf: Shelf) -> None:
    shelf.put("a", STATE)
    told = shelf.told(f"convert {A} b.npz")
    assert told.pop("seconds") > 0
    assert told.pop("size_bytes") == Path("b.npz").stat().st_size
    assert told == {"source": A, "target": "b.npz", "tensors": 2, "left_out": ["step"], "repaired": []}


def test_safetensors_become_a_checkpoint_and_that_becomes_safetensors(shelf: Shelf) -> None:
    save_file({"w": np.arange(6.0)}, "one.safetensors")
    assert shelf.run("convert one.safetensors checkpoints/a").code == 0
    assert load(A)["model"]["w"].tolist() == list(range(6))
    assert shelf.run(f"convert {A} two.safetensors").code == 0
    assert load_file("two.safetensors")["w"].tolist() == list(range(6))


def test_a_directory_of_another_tool_is_a_source(shelf: Shelf) -> None:
    Path("llama").mkdir()
    save_file({"w": np.zeros(2)}, "llama/model.safetensors")
    (Path("llama") / "config.json").write_text("{}")
    assert shelf.told("convert llama checkpoints/a")["tensors"] == 1


def test_values_that_a_file_cannot_hold_are_told(shelf: Shelf) -> None:
    shelf.put("a", STATE)
    said = shelf.run(f"convert {A} b.npz")
    assert said.lines[1] == "  left out, being no arrays: step"
    assert np.load("b.npz")["model/w"].shape == (3, 4)


def test_a_chunk_that_was_read_elsewhere_is_told(shelf: Shelf) -> None:
    shelf.put("a", STATE, STATE, copies=2)
    shelf.damage(shelf.files("a")[0], 4096)
    said = shelf.run(f"convert {A} checkpoints/b --format single_file")
    assert said.code == 0
    assert "is damaged; the same bytes were read from" in said.lines[1]
    assert len(shelf.told(f"convert {A} checkpoints/c --format single_file")["repaired"]) == 1


@pytest.mark.parametrize("target", ["checkpoints/b", "b.safetensors", "b.npz"])
def test_what_is_there_stays(shelf: Shelf, target: str) -> None:
    shelf.put("a", STATE)
    assert shelf.run(f"convert {A} {target}").code == 0
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    code, error = shelf.failed(f"convert {A} {target}")
    assert (code, error["code"]) == (3, "checkpoint_exists")
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("convert checkpoints/none checkpoints/b", 3),
        ("convert none.safetensors checkpoints/b", 1),
        (f"convert {A} b.npz --compression fast", 2),
        (f"convert {A} b.safetensors.index.json", 2),
        (f"convert {A} checkpoints/b!", 2),
        (f"convert {A} checkpoints/b --format zip", 2),
        (f"convert {A} checkpoints/b --compression best", 2),
        (f"convert {A} checkpoints/b --timeout 0.000000001", 4),
    ],
)
def test_what_cannot_be_done_leaves_nothing(shelf: Shelf, line: str, code: int) -> None:
    shelf.put("a", STATE)
    before = sorted(Path().rglob("*"))
    assert shelf.failed(line)[0] == code
    assert sorted(Path().rglob("*")) == before


def test_a_damaged_source_leaves_nothing(shelf: Shelf) -> None:
    shelf.put("a", *[{"w": ShardedArray(np.full(4, at), (8,), (at,))} for at in (0, 4)])
    shelf.damage(shelf.files("a")[1], 4096)
    assert shelf.failed(f"convert {A} checkpoints/b") == (1, shelf.failed(f"cat {A} w")[1])
    assert shelf.told("ls")["unfinished"] == []
    assert not shelf.manifest("b").exists()


def test_a_source_that_lacks_a_file_is_damaged(shelf: Shelf) -> None:
    shelf.put("a")
    shelf.files("a")[0].unlink()
    code, error = shelf.failed(f"convert {A} checkpoints/b")
    assert (code, error["code"]) == (1, "checkpoint_file_missing")
