from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from forged.data.dataset import Dataset
from forged.data.store.directory import DirectoryShardStore
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
    """With which error a worker is refused the directory; empty if it is not."""
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


def test_a_directory_is_one_processs_until_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OCCUPY, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        assert code_of(tmp_path) == "shard_directory_in_use"
        other.kill()
    assert code_of(tmp_path) == ""


def test_the_same_process_may_come_back_to_it_and_does_not_lose_it_by_that(tmp_path: Path) -> None:
    assert [code_of(tmp_path), code_of(tmp_path)] == ["", ""]
    command = [sys.executable, "-c", OCCUPY, str(tmp_path)]
    other = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert "use one directory per worker" in other.stderr


def test_a_forked_child_is_another_process(tmp_path: Path) -> None:
    assert code_of(tmp_path) == ""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(code_of, (tmp_path,)) == "shard_directory_in_use"


@pytest.mark.parametrize(("samples", "shards"), [(SAMPLES + 1, SHARDS), (SAMPLES, SHARDS - 1)])
def test_shards_of_another_dataset_are_not_taken_for_those_of_this_one(
    tmp_path: Path, samples: int, shards: int
) -> None:
    assert code_of(tmp_path) == ""
    put(tmp_path)
    assert code_of(tmp_path, samples, shards) == "shard_directory_differs"
    assert code_of(tmp_path) == ""


def test_an_empty_directory_may_be_given_to_another_dataset(tmp_path: Path) -> None:
    assert [code_of(tmp_path), code_of(tmp_path, SAMPLES + 1)] == ["", ""]
    put(tmp_path)
    assert [code_of(tmp_path), code_of(tmp_path, SAMPLES + 1)] == ["shard_directory_differs", ""]


def test_shards_that_were_put_before_anybody_said_of_what_they_are_are_believed(tmp_path: Path) -> None:
    put(tmp_path)
    data = TrainingData(SAMPLES, SHARDS, DirectoryShardStore(tmp_path))
    assert data.store.holds(3)


def test_what_cannot_be_locked_or_written_is_the_operators(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    assert code_of(tmp_path) == "shard_directory_unusable"
    assert not (tmp_path / "elsewhere").exists()


def test_no_descriptor_is_left_behind_by_who_is_refused(tmp_path: Path) -> None:
    assert code_of(tmp_path) == ""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_without_leaving_descriptors, (tmp_path,)) == "shard_directory_in_use"


def test_a_dataset_is_told_by_its_numbers(tmp_path: Path) -> None:
    DirectoryShardStore(tmp_path).dedicate(Dataset(SAMPLES, SHARDS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset-100.10", "lock"]
