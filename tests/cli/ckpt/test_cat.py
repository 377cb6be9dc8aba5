"""`forgectl ckpt cat` shows a tensor, or writes it to a file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from forged.checkpoint.model import CompressionLevel, PerRank, ShardedArray
from forged.cli.ckpt import cat
from tests.cli.ckpt.conftest import CheckpointFolder

Array = np.ndarray[Any, Any]
A = "checkpoints/a"


def test_text_shows_first_elements_and_statistics(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {"model": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}})
    output = checkpoint_folder.run(f"cat {A} model/w")
    assert (output.code, output.err) == (0, "")
    assert dict(line.split(None, 1) for line in output.lines) == {
        "name": "model/w", "dtype": "float32", "shape": "3×4", "size": "48 B",
        "head": "0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, …", "min": "0.0", "max": "11.0", "mean": "5.5",
        "std": "3.45205", "zeros": "1",
    }  # fmt: skip


def test_json_has_all_fields(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {"w": np.array([1.0, np.nan, np.inf])})
    assert checkpoint_folder.run_json(f"cat {A} w") == {
        "name": "w", "rank": None, "dtype": "float64", "shape": [3], "size_bytes": 24, "head": [1.0, None, None],
        "statistics": {"min": 1.0, "max": 1.0, "mean": 1.0, "std": 0.0, "zeros": 0, "nan": 1, "infinite": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    "array",
    [
        np.array(5.0),
        np.zeros((0, 3)),
        np.array([b"ab", b"c"]),
        np.array(["ä\x1b", "b"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.arange(3).astype(ml_dtypes.float8_e4m3fn),
        np.array([1 + 2j]),
        np.array([True]),
        np.arange(3, dtype=">i4"),
        np.zeros(2, "S0"),
        np.zeros(2, "V3"),
    ],
    ids=lambda array: array.dtype.str,
)
class TestEveryType:
    def test_is_shown(self, checkpoint_folder: CheckpointFolder, array: Array) -> None:
        checkpoint_folder.save("a", {"x": array})
        output = checkpoint_folder.run(f"cat {A} x")
        assert (output.code, output.err) == (0, "")
        assert "\x1b" not in output.out
        assert checkpoint_folder.run_json(f"cat {A} x")["shape"] == list(array.shape)

    def test_is_written_to_a_file(self, checkpoint_folder: CheckpointFolder, array: Array) -> None:
        checkpoint_folder.save("a", {"x": array})
        assert checkpoint_folder.run_json(f"cat {A} x --out x.npy")["file"] == "x.npy"
        got = np.load("x.npy")
        if got.dtype.kind == "V":
            got = got.view(array.dtype)
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert got.tobytes() == array.tobytes()


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
@pytest.mark.parametrize("shape", [(1 << 18,), (300, 1000), (3, 5, 40000), (2, 1, 7, 30000)])
def test_a_tensor_of_many_blocks_and_parts_is_assembled(
    checkpoint_folder: CheckpointFolder,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    level: CompressionLevel,
) -> None:
    monkeypatch.setattr(cat, "BLOCK_BYTES", 1 << 18)
    array = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    at = shape[0] // 2
    checkpoint_folder.save(
        "a",
        {"w": ShardedArray(array[:at], shape, (0,) * len(shape))},
        {"w": ShardedArray(array[at:], shape, (at, *(0,) * (len(shape) - 1)))},
        level=level,
    )
    checkpoint_folder.run(f"cat {A} w --out w.npy")
    assert np.array_equal(np.load("w.npy"), array)
    result = checkpoint_folder.run_json(f"cat {A} w")["statistics"]
    assert (result["min"], result["max"], result["mean"]) == (0, array.size - 1, pytest.approx(array.mean()))


class TestPerRankTensors:
    @pytest.fixture(autouse=True)
    def _own(self, checkpoint_folder: CheckpointFolder) -> None:
        states = [{"own": PerRank(np.full(2, rank)), "all": np.zeros(1), "seed": PerRank(rank)} for rank in range(3)]
        checkpoint_folder.save("a", *states)

    def test_rank_selects_the_tensor(self, checkpoint_folder: CheckpointFolder) -> None:
        assert checkpoint_folder.run_json(f"cat {A} own --rank 2")["head"] == [2, 2]

    def test_an_ambiguous_name_without_a_rank_is_refused(self, checkpoint_folder: CheckpointFolder) -> None:
        code, error = checkpoint_folder.run_failing(f"cat {A} own")
        assert (code, error["fix"]) == (2, "name one rank, such as --rank 0")

    def test_the_error_for_a_missing_rank_lists_the_ranks(self, checkpoint_folder: CheckpointFolder) -> None:
        code, error = checkpoint_folder.run_failing(f"cat {A} own --rank 7")
        assert (code, error["fix"]) == (3, "ranks with this tensor: 0, 1, 2")

    def test_a_common_tensor_is_found_for_any_rank(self, checkpoint_folder: CheckpointFolder) -> None:
        assert checkpoint_folder.run_json(f"cat {A} all --rank 2")["rank"] is None

    def test_per_rank_values_are_shown(self, checkpoint_folder: CheckpointFolder) -> None:
        assert checkpoint_folder.run_json(f"cat {A} seed --rank 1") == {"name": "seed", "rank": 1, "value": 1}


def test_a_tensor_of_one_rank_needs_no_rank_option(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {"own": PerRank(np.zeros(1))})
    assert checkpoint_folder.run_json(f"cat {A} own")["rank"] == 0


def test_a_value_that_is_not_an_array_is_shown(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {"step": 7, "name": "a\x1b[2J"})
    assert checkpoint_folder.run(f"cat {A} step").out == "7\n"
    assert checkpoint_folder.run(f"cat {A} name").out == "a\\x1b[2J\n"


def test_the_error_for_a_mistyped_name_suggests_names(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    code, error = checkpoint_folder.run_failing(f"cat {A} model/v")
    assert (code, error["code"], error["fix"]) == (3, "checkpoint_tensor_unknown", "did you mean model/w?")
    assert "ckpt show" in checkpoint_folder.run_failing(f"cat {A} zzz")[1]["fix"]


class TestFile:
    @pytest.mark.parametrize("make", [lambda path: path.write_text("old"), lambda path: path.symlink_to("nowhere")])
    def test_an_existing_file_is_replaced_only_with_force(
        self, checkpoint_folder: CheckpointFolder, make: Callable[[Path], Any]
    ) -> None:
        checkpoint_folder.save("a", {"w": np.arange(3)})
        make(Path("w.npy"))
        before = Path("w.npy").lstat()
        code, error = checkpoint_folder.run_failing(f"cat {A} w --out w.npy")
        assert (code, error["code"], error["message"]) == (3, "file_exists", "w.npy exists already")
        assert "--force" in error["fix"]
        assert Path("w.npy").lstat() == before
        assert sorted(path.name for path in Path().iterdir()) == ["checkpoints", "w.npy"]

    def test_a_replaced_file_is_never_incomplete(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a", {"w": np.arange(3)})
        Path("w.npy").write_text("old")
        output = checkpoint_folder.run(f"cat {A} w --out w.npy --force")
        assert output.code == 0
        assert np.load("w.npy").tolist() == [0, 1, 2]
        assert sorted(path.name for path in Path().iterdir()) == ["checkpoints", "w.npy"]

    def test_the_file_mode_follows_the_umask(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a", {"w": np.arange(3)})
        before = os.umask(0o027)
        try:
            checkpoint_folder.run(f"cat {A} w --out w.npy")
        finally:
            os.umask(before)
        assert stat.S_IMODE(Path("w.npy").stat().st_mode) == 0o640

    def test_a_corrupt_tensor_leaves_the_existing_file(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a", {"w": np.arange(3)})
        checkpoint_folder.flip_bit(checkpoint_folder.files("a")[0], 4096)
        Path("w.npy").write_text("old")
        code, error = checkpoint_folder.run_failing(f"cat {A} w --out w.npy --force")
        assert (code, error["code"]) == (1, "checkpoint_chunk_corrupt")
        assert Path("w.npy").read_text() == "old"

    def test_text_explains_how_to_read_a_type_that_numpy_lacks(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a", {"w": np.ones(3, ml_dtypes.bfloat16)})
        assert "numpy.load(…).view(ml_dtypes.bfloat16)" in checkpoint_folder.run(f"cat {A} w --out w.npy").out

    def test_an_unwritable_path_is_reported(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a", {"w": np.arange(3)})
        code, error = checkpoint_folder.run_failing(f"cat {A} w --out nowhere/w.npy")
        assert (code, error["code"]) == (1, "file_unwritable")
        assert os.strerror(errno.ENOENT) in error["message"]
