"""`forgectl ckpt convert` converts checkpoints and files of other tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from forged.checkpoint import load
from forged.checkpoint.model import ShardedArray
from tests.cli.ckpt.conftest import STATE, CheckpointFolder

A = "checkpoints/a"


@pytest.mark.parametrize("layout", ["multi_shard", "single_file", "consolidated"])
@pytest.mark.parametrize("compression", ["none", "fast"])
def test_a_checkpoint_converts_to_another_format(
    checkpoint_folder: CheckpointFolder, layout: str, compression: str
) -> None:
    checkpoint_folder.save("a", STATE, STATE)
    output = checkpoint_folder.run(f"convert {A} checkpoints/b --format {layout} --compression {compression}")
    assert (output.code, output.err) == (0, "")
    assert output.out.startswith("checkpoints/b: 2 tensors, ")
    assert len(output.lines) == 1
    [row] = [row for row in checkpoint_folder.run_json("ls")["checkpoints"] if row["prefix"] == "b"]
    assert (row["layout"], row["compression"]) == (layout, compression)
    assert checkpoint_folder.run(f"diff {A} checkpoints/b").code == 0


def test_json_has_all_fields(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", STATE)
    result = checkpoint_folder.run_json(f"convert {A} b.npz")
    assert result.pop("seconds") > 0
    assert result.pop("size_bytes") == Path("b.npz").stat().st_size
    assert result == {"source": A, "target": "b.npz", "tensors": 2, "left_out": ["step"], "repaired": []}


def test_safetensors_convert_to_a_checkpoint_and_back(checkpoint_folder: CheckpointFolder) -> None:
    save_file({"w": np.arange(6.0)}, "one.safetensors")
    assert checkpoint_folder.run("convert one.safetensors checkpoints/a").code == 0
    assert load(A)["model"]["w"].tolist() == list(range(6))
    assert checkpoint_folder.run(f"convert {A} two.safetensors").code == 0
    assert load_file("two.safetensors")["w"].tolist() == list(range(6))


def test_a_model_directory_is_a_source(checkpoint_folder: CheckpointFolder) -> None:
    Path("llama").mkdir()
    save_file({"w": np.zeros(2)}, "llama/model.safetensors")
    (Path("llama") / "config.json").write_text("{}")
    assert checkpoint_folder.run_json("convert llama checkpoints/a")["tensors"] == 1


def test_left_out_values_are_listed(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", STATE)
    output = checkpoint_folder.run(f"convert {A} b.npz")
    assert output.lines[1] == "  left out (the target cannot hold them): step"
    assert np.load("b.npz")["model/w"].shape == (3, 4)


def test_a_repaired_chunk_is_reported(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", STATE, STATE, copies=2)
    checkpoint_folder.flip_bit(checkpoint_folder.files("a")[0], 4096)
    output = checkpoint_folder.run(f"convert {A} checkpoints/b --format single_file")
    assert output.code == 0
    assert "is corrupt; its bytes were read from" in output.lines[1]
    assert len(checkpoint_folder.run_json(f"convert {A} checkpoints/c --format single_file")["repaired"]) == 1


@pytest.mark.parametrize("target", ["checkpoints/b", "b.safetensors", "b.npz"])
def test_an_existing_target_is_not_replaced(checkpoint_folder: CheckpointFolder, target: str) -> None:
    checkpoint_folder.save("a", STATE)
    assert checkpoint_folder.run(f"convert {A} {target}").code == 0
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    code, error = checkpoint_folder.run_failing(f"convert {A} {target}")
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
def test_a_failed_conversion_leaves_nothing(checkpoint_folder: CheckpointFolder, line: str, code: int) -> None:
    checkpoint_folder.save("a", STATE)
    before = sorted(Path().rglob("*"))
    assert checkpoint_folder.run_failing(line)[0] == code
    assert sorted(Path().rglob("*")) == before


def test_a_corrupt_source_leaves_nothing(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", *[{"w": ShardedArray(np.full(4, at), (8,), (at,))} for at in (0, 4)])
    checkpoint_folder.flip_bit(checkpoint_folder.files("a")[1], 4096)
    assert checkpoint_folder.run_failing(f"convert {A} checkpoints/b") == (
        1,
        checkpoint_folder.run_failing(f"cat {A} w")[1],
    )
    assert checkpoint_folder.run_json("ls")["unfinished"] == []
    assert not checkpoint_folder.manifest("b").exists()


def test_a_source_without_a_file_is_corrupt(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    checkpoint_folder.files("a")[0].unlink()
    code, error = checkpoint_folder.run_failing(f"convert {A} checkpoints/b")
    assert (code, error["code"]) == (1, "checkpoint_file_missing")
