"""Sharded models (FSDP2, HSDP, FSDP over tensor parallelism) in processes of their own, on gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forged.checkpoint as fc
from tests.torch.sharded_ranks import FSDP, HSDP, PLAIN, TENSOR_PARALLEL, loaded

HANGS_S = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks have saved."""
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, "-m", "tests.torch.sharded_ranks", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    """By what was done, the digests of all tensors."""
    return json.loads((folder / "found.json").read_text())


def test_fsdp_state_of_four_ranks_is_loaded_by_three_and_by_one(found: Any) -> None:
    assert found["fsdp loaded by three"] == found["fsdp saved"]
    assert found["fsdp loaded by one"] == found["fsdp saved"]


def test_state_of_one_process_is_loaded_by_fsdp_ranks(found: Any) -> None:
    assert found["plain loaded by four"] == found["plain saved"]


def test_replicated_shards_are_loaded_by_one(found: Any) -> None:
    assert found["hsdp loaded by one"] == found["hsdp saved"]


@pytest.mark.parametrize("layout", [FSDP, HSDP, TENSOR_PARALLEL])
def test_sharded_state_is_loaded_and_sent_by_the_same_ranks(found: Any, layout: str) -> None:
    assert found[f"{layout} loaded"] == found[f"{layout} saved"]
    sent, arrived = found[f"{layout} transferred"]
    assert arrived == sent


def test_directory_that_four_ranks_saved_with_dcp_is_converted(found: Any, folder: Path) -> None:
    fc.convert(folder / "dcp", folder / "from-dcp")
    assert loaded(PLAIN, folder, "from-dcp", None) == found["dcp saved"]


def test_converted_directory_is_loaded_by_four_ranks_with_dcp(found: Any) -> None:
    assert found["converted loaded by four"] == found["fsdp saved"]


def test_sharded_tensors_are_whole_in_the_checkpoint(folder: Path) -> None:
    with fc.view(folder / FSDP) as view:
        assert view.info("all/model/3.weight").shape == (5, 33)
        assert view.info("all/opt/state/#0/exp_avg").shape == (33, 33)
