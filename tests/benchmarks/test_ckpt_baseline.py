"""The references: they move the bytes that they say they move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.ckpt_baseline import (
    BLOCK_BYTES,
    Baseline,
    read_buffered,
    read_direct,
    removed,
    write_buffered,
    write_direct,
)
from benchmarks.ckpt_workload import Workload, temporary_directory

LOAD = Workload(3, (16, 1024))


@pytest.mark.parametrize("write", [write_direct, write_buffered])
@pytest.mark.parametrize("nbytes", [1, 4096, BLOCK_BYTES + 5, 3 * BLOCK_BYTES])
def test_a_raw_write_leaves_a_file_of_that_many_bytes_in_whole_pages(
    write: Callable[[Path, int], float], nbytes: int
) -> None:
    with temporary_directory() as path:
        assert write(path / "file", nbytes) > 0
        written = (path / "file").read_bytes()
    assert len(written) == -(-nbytes // 4096) * 4096
    assert np.count_nonzero(np.frombuffer(written, np.uint8)) > 0.9 * len(written)


@pytest.mark.parametrize("read", [read_direct, read_buffered])
def test_a_raw_read_reads_the_whole_file(read: Callable[[Path], float]) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    with temporary_directory() as path:
        (path / "file").write_bytes(bytes(BLOCK_BYTES + 5))
        before = bytes_read()
        assert read(path / "file") > 0
        assert bytes_read() - before >= BLOCK_BYTES + 5


def test_measured_checkpoint_and_its_neighbour_files_are_removed(tmp_path: Path) -> None:
    def save(path: Path) -> float:
        path.mkdir()
        (path / "part").write_bytes(b"")
        path.with_name(f"{path.name}.metadata.json").write_bytes(b"")
        return 2.0

    (tmp_path / "kept").write_bytes(b"")
    assert removed(tmp_path / "ours", save) == 2.0
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


def test_it_is_removed_when_the_measurement_fails(tmp_path: Path) -> None:
    def save(path: Path) -> float:
        path.write_bytes(b"")
        raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        removed(tmp_path / "ours", save)
    assert list(tmp_path.iterdir()) == []


def test_safetensors_saves_the_state_and_has_it_in_arrays_again(tmp_path: Path) -> None:
    plain = Baseline(LOAD)
    assert plain.save_safetensors(tmp_path / "file") > 0
    saved = load_file(tmp_path / "file")
    assert all((saved[name].view("u4") == array.view("u4")).all() for name, array in LOAD.state().items())
    assert plain.load_safetensors(tmp_path / "file") > 0
    assert plain.read_safetensors(tmp_path / "file") > 0
    assert plain.copy() > 0
