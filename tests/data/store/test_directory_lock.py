from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forged.data.model import Dataset
from forged.data.store.directory import DirectoryShardStore
from forged.data.store.errors import StoreFailed
from forged.data.training import TrainingData
from forged.errors import ConfigError
from tests.data.transfer_cluster import open_descriptors

SAMPLES, SHARDS = 100, 10
OCCUPY = """
import sys
from forged.data import TrainingData
data = TrainingData(100, 10, sys.argv[1])
print("here", flush=True)
sys.stdin.read()
"""


def code_of(path: Path, samples: int = SAMPLES, shards: int = SHARDS) -> str:
    """The error code with which a worker is refused the directory; empty if it is accepted."""
    try:
        TrainingData(samples, shards, path)
    except ConfigError as error:
        return error.code
    return ""


def _without_leaving_descriptors(path: Path) -> str:
    before = open_descriptors()
    code = code_of(path)
    assert open_descriptors() == before
    return code


def put(path: Path) -> None:
    DirectoryShardStore(path).put(3, [b"bytes"])


def test_directory_belongs_to_one_process_until_that_process_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OCCUPY, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        assert code_of(tmp_path) == "shard_directory_in_use"
        other.kill()
    assert code_of(tmp_path) == ""


def test_same_process_may_reopen_the_directory_and_keeps_it(tmp_path: Path) -> None:
    assert [code_of(tmp_path), code_of(tmp_path)] == ["", ""]
    command = [sys.executable, "-c", OCCUPY, str(tmp_path)]
    other = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert "use one directory per worker" in other.stderr


def test_forked_child_is_refused_the_directory(tmp_path: Path) -> None:
    assert code_of(tmp_path) == ""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(code_of, (tmp_path,)) == "shard_directory_in_use"


def test_forked_child_stores_shards_in_the_directory_of_its_parent(tmp_path: Path) -> None:
    data = TrainingData(SAMPLES, SHARDS, tmp_path)
    child = multiprocessing.get_context("fork").Process(target=data.store.put, args=(3, [b"bytes"]))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert DirectoryShardStore(tmp_path).holds(3)


@pytest.mark.parametrize(("samples", "shards"), [(SAMPLES + 1, SHARDS), (SAMPLES, SHARDS - 1)])
def test_directory_with_shards_of_another_dataset_is_refused(tmp_path: Path, samples: int, shards: int) -> None:
    assert code_of(tmp_path) == ""
    put(tmp_path)
    assert code_of(tmp_path, samples, shards) == "shard_directory_differs"
    assert code_of(tmp_path) == ""


def test_empty_directory_accepts_another_dataset(tmp_path: Path) -> None:
    assert [code_of(tmp_path), code_of(tmp_path, SAMPLES + 1)] == ["", ""]
    put(tmp_path)
    assert [code_of(tmp_path), code_of(tmp_path, SAMPLES + 1)] == ["shard_directory_differs", ""]


def test_directory_without_a_dataset_marker_keeps_its_shards(tmp_path: Path) -> None:
    put(tmp_path)
    data = TrainingData(SAMPLES, SHARDS, DirectoryShardStore(tmp_path))
    assert data.store.holds(3)


def test_directory_that_cannot_be_locked_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    assert code_of(tmp_path) == "shard_directory_unusable"
    assert not (tmp_path / "elsewhere").exists()


def test_refused_process_leaks_no_descriptors(tmp_path: Path) -> None:
    assert code_of(tmp_path) == ""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_without_leaving_descriptors, (tmp_path,)) == "shard_directory_in_use"


def test_marker_file_names_samples_and_shards(tmp_path: Path) -> None:
    DirectoryShardStore(tmp_path).dedicate(Dataset(SAMPLES, SHARDS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset-100.10", "lock"]


def test_directory_that_another_process_has_made_again_fails_the_store(tmp_path: Path) -> None:
    path = tmp_path / "shards"
    data = TrainingData(SAMPLES, SHARDS, path)
    shutil.rmtree(path)
    command = [sys.executable, "-c", OCCUPY, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        with pytest.raises(StoreFailed, match="another process uses the shard directory"):
            data.store.put(3, [b"bytes"])
        other.kill()
    data.store.put(3, [b"bytes"])
    assert data.store.holds(3)
