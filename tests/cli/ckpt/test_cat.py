"""`forgectl ckpt cat`: a look at a tensor, or all of it."""

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
from tests.cli.ckpt.conftest import Shelf

Array = np.ndarray[Any, Any]
A = "checkpoints/a"


def test_people_are_told_its_beginning_and_its_statistics(shelf: Shelf) -> None:
    shelf.put("a", {"model": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}})
    said = shelf.run(f"cat {A} model/w")
    assert (said.code, said.err) == (0, "")
    assert dict(line.split(None, 1) for line in said.lines) == {
        "name": "model/w", "dtype": "float32", "shape": "3×4", "size": "48 B",
        "head": "0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, …", "min": "0.0", "max": "11.0", "mean": "5.5",
        "std": "3.45205", "zeros": "1",
    }  # fmt: skip


def test_programs_are_told_all_of_it(shelf: Shelf) -> None:
    shelf.put("a", {"w": np.array([1.0, np.nan, np.inf])})
    assert shelf.told(f"cat {A} w") == {
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
    def test_can_be_looked_at(self, shelf: Shelf, array: Array) -> None:
        shelf.put("a", {"x": array})
        said = shelf.run(f"cat {A} x")
        assert (said.code, said.err) == (0, "")
        assert "\x1b" not in said.out
        assert shelf.told(f"cat {A} x")["shape"] == list(array.shape)

    def test_can_be_had_as_a_file(self, shelf: Shelf, array: Array) -> None:
        shelf.put("a", {"x": array})
        assert shelf.told(f"cat {A} x --out x.npy")["file"] == "x.npy"
        got = np.load("x.npy")
        if got.dtype.kind == "V":
            got = got.view(array.dtype)
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert got.tobytes() == array.tobytes()


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
@pytest.mark.parametrize("shape", [(1 << 18,), (300, 1000), (3, 5, 40000), (2, 1, 7, 30000)])
def test_a_tensor_of_many_blocks_in_many_parts_is_put_together(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], level: CompressionLevel
) -> None:
    monkeypatch.setattr(cat, "BLOCK_BYTES", 1 << 18)
    array = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    at = shape[0] // 2
    shelf.put(
        "a",
        {"w": ShardedArray(array[:at], shape, (0,) * len(shape))},
        {"w": ShardedArray(array[at:], shape, (at, *(0,) * (len(shape) - 1)))},
        level=level,
    )
    shelf.run(f"cat {A} w --out w.npy")
    assert np.array_equal(np.load("w.npy"), array)
    told = shelf.told(f"cat {A} w")["statistics"]
    assert (told["min"], told["max"], told["mean"]) == (0, array.size - 1, pytest.approx(array.mean()))


class TestOfRanks:
    @pytest.fixture(autouse=True)
    def _own(self, shelf: Shelf) -> None:
        states = [{"own": PerRank(np.full(2, rank)), "all": np.zeros(1), "seed": PerRank(rank)} for rank in range(3)]
        shelf.put("a", *states)

    def test_the_rank_says_whose_is_meant(self, shelf: Shelf) -> None:
        assert shelf.told(f"cat {A} own --rank 2")["head"] == [2, 2]

    def test_without_a_rank_it_is_refused_where_several_have_one(self, shelf: Shelf) -> None:
        code, error = shelf.failed(f"cat {A} own")
        assert (code, error["fix"]) == (2, "say which is meant: --rank 0")

    def test_a_rank_that_has_none_is_told_who_has(self, shelf: Shelf) -> None:
        code, error = shelf.failed(f"cat {A} own --rank 7")
        assert (code, error["fix"]) == (3, "these ranks have one: 0, 1, 2")

    def test_what_all_have_any_rank_has(self, shelf: Shelf) -> None:
        assert shelf.told(f"cat {A} all --rank 2")["rank"] is None

    def test_values_are_of_ranks_too(self, shelf: Shelf) -> None:
        assert shelf.told(f"cat {A} seed --rank 1") == {"name": "seed", "rank": 1, "value": 1}


def test_where_one_rank_has_it_nobody_needs_to_say_which(shelf: Shelf) -> None:
    shelf.put("a", {"own": PerRank(np.zeros(1))})
    assert shelf.told(f"cat {A} own")["rank"] == 0


def test_a_value_that_is_no_array_is_shown_as_it_is(shelf: Shelf) -> None:
    shelf.put("a", {"step": 7, "name": "a\x1b[2J"})
    assert shelf.run(f"cat {A} step").out == "7\n"
    assert shelf.run(f"cat {A} name").out == "a\\x1b[2J\n"


def test_a_name_that_is_mistyped_is_told_what_it_may_have_been(shelf: Shelf) -> None:
    shelf.put("a")
    code, error = shelf.failed(f"cat {A} model/v")
    assert (code, error["code"], error["fix"]) == (3, "checkpoint_tensor_unknown", "is it model/w?")
    assert "ckpt show" in shelf.failed(f"cat {A} zzz")[1]["fix"]


class TestFile:
    @pytest.mark.parametrize("make", [lambda path: path.write_text("old"), lambda path: path.symlink_to("nowhere")])
    def test_what_is_there_stays_unless_it_is_to_be_replaced(self, shelf: Shelf, make: Callable[[Path], Any]) -> None:
        shelf.put("a", {"w": np.arange(3)})
        make(Path("w.npy"))
        before = Path("w.npy").lstat()
        code, error = shelf.failed(f"cat {A} w --out w.npy")
        assert (code, error["code"], error["message"]) == (3, "file_exists", "there is w.npy already")
        assert "--force" in error["fix"]
        assert Path("w.npy").lstat() == before
        assert sorted(path.name for path in Path().iterdir()) == ["checkpoints", "w.npy"]

    def test_what_was_there_before_is_replaced_as_a_whole(self, shelf: Shelf) -> None:
        shelf.put("a", {"w": np.arange(3)})
        Path("w.npy").write_text("old")
        said = shelf.run(f"cat {A} w --out w.npy --force")
        assert said.code == 0
        assert np.load("w.npy").tolist() == [0, 1, 2]
        assert sorted(path.name for path in Path().iterdir()) == ["checkpoints", "w.npy"]

    def test_others_may_read_it_as_the_mask_allows(self, shelf: Shelf) -> None:
        shelf.put("a", {"w": np.arange(3)})
        before = os.umask(0o027)
        try:
            shelf.run(f"cat {A} w --out w.npy")
        finally:
            os.umask(before)
        assert stat.S_IMODE(Path("w.npy").stat().st_mode) == 0o640

    def test_a_damaged_tensor_leaves_what_was_there(self, shelf: Shelf) -> None:
        shelf.put("a", {"w": np.arange(3)})
        shelf.damage(shelf.files("a")[0], 4096)
        Path("w.npy").write_text("old")
        code, error = shelf.failed(f"cat {A} w --out w.npy --force")
        assert (code, error["code"]) == (1, "checkpoint_chunk_corrupt")
        assert Path("w.npy").read_text() == "old"

    def test_how_a_type_is_read_that_numpy_lacks_is_told(self, shelf: Shelf) -> None:
        shelf.put("a", {"w": np.ones(3, ml_dtypes.bfloat16)})
        assert "numpy.load(…).view(ml_dtypes.bfloat16)" in shelf.run(f"cat {A} w --out w.npy").out

    def test_a_place_that_takes_no_file_is_told(self, shelf: Shelf) -> None:
        shelf.put("a", {"w": np.arange(3)})
        code, error = shelf.failed(f"cat {A} w --out nowhere/w.npy")
        assert (code, error["code"]) == (1, "file_unwritable")
        assert os.strerror(errno.ENOENT) in error["message"]
