"""Processes that are told what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ckpt_process import OURS, MeasuredProcess, forged_process
from benchmarks.ckpt_workload import Workload

LOAD = Workload(2, (4, 1024))


def test_process_runs_its_orders_and_measures_them(tmp_path: Path) -> None:
    with forged_process(LOAD) as peer:
        assert peer.run("save", tmp_path / "one")["s"] > 0
        peer.run("forget", tmp_path)
        loaded = peer.run("load", tmp_path / "one")
        peer.run("check", tmp_path)
    assert loaded["read"] >= LOAD.nbytes


def test_a_load_that_did_nothing_would_be_noticed(tmp_path: Path) -> None:
    with forged_process(LOAD) as peer:
        peer.run("forget", tmp_path)
        with pytest.raises(RuntimeError, match="not what was saved"):
            peer.run("check", tmp_path)


def test_an_error_there_is_an_error_here_and_the_process_goes_on(tmp_path: Path) -> None:
    with forged_process(LOAD) as peer:
        with pytest.raises(RuntimeError, match="nothing"):
            peer.run("load", tmp_path / "nothing")
        assert peer.run("save", tmp_path / "one")["s"] > 0


def test_a_process_that_ended_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="has ended"):
        MeasuredProcess(OURS, ["nonsense"])


def test_the_memory_of_an_asynchronous_save_is_counted_from_the_beginning(tmp_path: Path) -> None:
    load = Workload(4, (1024, 1024))
    with forged_process(load) as peer:
        peer.run("prepare", tmp_path)
        stalled = peer.run("stall", tmp_path / "one")
    assert 0 < stalled["s"] <= stalled["all_s"]
    assert stalled["extra"] > 0.9 * load.nbytes
