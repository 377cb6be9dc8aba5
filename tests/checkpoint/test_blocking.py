"""Blocking calls, in scripts with and without an event loop."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import forged.checkpoint
from forged.checkpoint import (
    BlockingCheckpoint,
    CheckpointException,
    CheckpointFormat,
    DistributedCheckpoint,
    ExceptionType,
    LoadOptions,
    SaveOptions,
    ShardedArray,
)
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_reader import same, state_of
from tests.checkpoint.test_rank_group import Threads

ENDS_WITHIN_S = 10.0
STATE = {"model": {"w": np.arange(1000.0).reshape(10, 100), "b": np.float32(3)}, "step": 7, "names": ("a", b"b", None)}


def test_save_and_load_by_path(tmp_path: Path) -> None:
    forged.checkpoint.save(tmp_path / "step-100", STATE)
    assert same(forged.checkpoint.load(tmp_path / "step-100"), STATE)
    assert same(forged.checkpoint.load(f"{tmp_path}/step-100"), STATE)


def test_given_arrays_are_filled(tmp_path: Path) -> None:
    forged.checkpoint.save(tmp_path / "a", STATE)
    mine: Any = {"model": {"w": np.zeros((10, 100)), "b": np.float32(0)}, "step": 0, "names": ("", b"", None)}
    weights = mine["model"]["w"]
    found = forged.checkpoint.load(tmp_path / "a", mine)
    assert found["model"]["w"] is weights
    assert same(found, STATE)


class Module:
    """An object with a state."""

    def __init__(self, value: int) -> None:
        self.weights = np.full(9, float(value))
        self.updates = value

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: Any) -> None:
        self.weights, self.updates = state["weights"], state["updates"]


def test_objects_of_a_state_are_saved_and_loaded_in_place(tmp_path: Path) -> None:
    forged.checkpoint.save(tmp_path / "a", {"model": Module(5), "list": [Module(6)], "step": 7})
    assert same(forged.checkpoint.load(tmp_path / "a")["model"], Module(5).state_dict())
    state: dict[str, Any] = {"model": Module(0), "list": [Module(0)], "step": 0}
    model, inner = state["model"], state["list"][0]
    assert forged.checkpoint.load(tmp_path / "a", state) is state
    assert (model.updates, inner.updates, state["step"]) == (5, 6, 7)
    assert (model.weights == 5).all()


def test_state_may_be_an_object(tmp_path: Path) -> None:
    forged.checkpoint.save(tmp_path / "a", Module(5))
    module = Module(0)
    assert forged.checkpoint.load(tmp_path / "a", module) is module
    assert module.updates == 5


def test_object_that_is_its_own_state_is_refused(tmp_path: Path) -> None:
    class Endless(Module):
        def state_dict(self) -> Any:
            return self

    with pytest.raises(CheckpointException, match="cannot be saved"):
        forged.checkpoint.save(tmp_path / "a", {"x": Endless(1)})


def test_error_of_load_state_dict_is_raised(tmp_path: Path) -> None:
    class Failing(Module):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError("another architecture")

    forged.checkpoint.save(tmp_path / "a", Module(5))
    with pytest.raises(CheckpointException, match="another architecture"):
        forged.checkpoint.load(tmp_path / "a", Failing(0))


def test_only_selects_tensors(tmp_path: Path) -> None:
    forged.checkpoint.save(tmp_path / "a", {"model": {"x": np.ones(3), "y": np.ones(4)}, "other": np.ones(5)})
    for only in ("model/x", ["model/x"], "*/x"):
        assert same(forged.checkpoint.load(tmp_path / "a", only=only)["model"]["x"], np.ones(3))


@pytest.mark.parametrize("layout", list(CheckpointFormat))
@pytest.mark.parametrize("level", ["none", "fast"])
def test_formats_and_levels_are_given_by_name(tmp_path: Path, layout: str, level: str) -> None:
    prefix = forged.checkpoint.save(
        tmp_path / "a", STATE, format=str(layout), compression_level=level, custom_metadata={"note": 1}
    )
    assert prefix == "a"
    assert same(forged.checkpoint.load(tmp_path / "a"), STATE)


def test_consolidated_files_open_with_safetensors(tmp_path: Path) -> None:
    forged.checkpoint.save(tmp_path / "a", {"model": {"layer": {"w": np.ones(3)}}}, format="consolidated")
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert same(load_file(tmp_path / "a" / index["weight_map"]["layer.w"]), {"layer.w": np.ones(3)})


@pytest.mark.parametrize("settings", [{"format": "tar"}, {"compression_level": "much"}, {"timeout": 0}])
def test_invalid_settings_are_refused_before_anything_is_written(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointException) as caught:
        forged.checkpoint.save(tmp_path / "a", STATE, **settings)
    assert caught.value.type is ExceptionType.VALIDATION_FAILED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "1"])
def test_invalid_timeouts_are_refused(tmp_path: Path, timeout: Any) -> None:
    forged.checkpoint.save(tmp_path / "a", STATE)
    with pytest.raises(CheckpointException, match="timeout must be") as caught:
        forged.checkpoint.load(tmp_path / "a", timeout=timeout)
    assert caught.value.type is ExceptionType.VALIDATION_FAILED
    with pytest.raises(CheckpointException, match="timeout must be"):
        forged.checkpoint.verify(tmp_path / "a", timeout=timeout)


def test_an_existing_name_is_refused(tmp_path: Path) -> None:
    forged.checkpoint.save(tmp_path / "a", STATE)
    with pytest.raises(CheckpointException) as caught:
        forged.checkpoint.save(tmp_path / "a", STATE)
    assert (caught.value.code, caught.value.checkpoint_path) == ("checkpoint_exists", "a")


def test_loading_a_missing_checkpoint_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        forged.checkpoint.load(tmp_path / "a")
    assert (caught.value.code, caught.value.type) == ("checkpoint_missing", ExceptionType.LOAD_FAILED)


async def test_calls_work_inside_a_running_event_loop(tmp_path: Path) -> None:
    """As in a notebook; the calls block its loop."""
    forged.checkpoint.save(tmp_path / "a", STATE)
    assert same(forged.checkpoint.load(tmp_path / "a"), STATE)


def test_every_async_method_has_a_blocking_one(tmp_path: Path) -> None:
    public = {name: method for name, method in vars(DistributedCheckpoint).items() if not name.startswith("_")}
    assert {name for name in public if inspect.iscoroutinefunction(public[name])} <= vars(BlockingCheckpoint).keys()
    with BlockingCheckpoint(DistributedCheckpoint(None, LocalStorage(tmp_path))) as one:
        one.prepare({"w": np.ones(3)}, {"m": np.ones(3)})
        assert one.save({"w": np.ones(3)}, {"m": np.ones(3)}, SaveOptions("a")) == "a"
        assert one.save_model_only({"w": np.ones(4)}, SaveOptions("b")) == "b"
        handle = one.save_async({"w": np.ones(5)}, options=SaveOptions("c"))
        assert handle.result() == "c"
        mine = {"w": np.zeros(5)}
        one.load(mine, options=LoadOptions("c"))
        assert mine["w"].all()
        assert [info.prefix for info in one.list_checkpoints()] == ["a", "b", "c"]
        one.delete_checkpoint("b")
        assert [info.prefix for info in one.list_checkpoints()] == ["a", "c"]


def test_leaving_the_context_waits_for_background_saves() -> None:
    storage = MemoryStorage()
    with BlockingCheckpoint(DistributedCheckpoint(None, storage)) as one:
        one.save_async({"w": np.ones(5)}, options=SaveOptions("a", include_rng_state=False))
    assert same(state_of(storage, "a"), {"model": {"w": np.ones(5)}})


def test_ranks_in_threads_save_and_load_together(tmp_path: Path) -> None:
    whole = np.arange(90.0).reshape(30, 3)
    before, then = Threads(3), Threads(2)

    def save(rank: int) -> str:
        part = ShardedArray(whole[10 * rank : 10 * rank + 10], (30, 3), (10 * rank, 0))
        return forged.checkpoint.save(tmp_path / "a", {"w": part}, ranks=before.rank(rank))

    def load(rank: int) -> Any:
        mine = {"w": ShardedArray(np.zeros((15, 3)), (30, 3), (15 * rank, 0))}
        forged.checkpoint.load(tmp_path / "a", mine, ranks=then.rank(rank))
        return mine["w"].local

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(save, range(3))) == ["a"] * 3
        assert same(np.concatenate(list(pool.map(load, range(2)))), whole)


def test_a_failure_at_one_rank_is_raised_at_all(tmp_path: Path) -> None:
    ranks = Threads(2)

    def save(rank: int) -> Any:
        with pytest.raises(CheckpointException) as caught:
            forged.checkpoint.save(tmp_path / "a", {"w": np.zeros(3 + rank)}, ranks=ranks.rank(rank))
        return caught.value.code

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(save, range(2))) == ["checkpoint_ranks_differ"] * 2
    assert list(tmp_path.iterdir()) == []


def test_save_and_load_leave_no_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    forged.checkpoint.save(tmp_path / "a", STATE)
    forged.checkpoint.load(tmp_path / "a")
    for thread in set(threading.enumerate()) - before:
        thread.join(ENDS_WITHIN_S)
    assert set(threading.enumerate()) <= before


INTERRUPTED = """
import os, signal, sys, threading, numpy as np
import forged.checkpoint
from forged.checkpoint import blocking
from forged.checkpoint.storage.local import LocalStorage

class Slow(LocalStorage):
    def write(self, name, source, halt):
        os.kill(os.getpid(), signal.SIGINT)
        halt.wait(60)

blocking.storage_at = lambda where: (Slow(where), "a")
try:
    forged.checkpoint.save(sys.argv[1], {"w": np.ones(3)})
except KeyboardInterrupt:
    print("interrupted", [thread.name for thread in threading.enumerate() if "checkpoint" in thread.name])
"""


def test_an_interrupt_ends_a_save_that_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "interrupted []\n", done.stderr
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []


def test_one_object_saves_several_checkpoints_concurrently(tmp_path: Path) -> None:
    async def both() -> None:
        one = DistributedCheckpoint(None, LocalStorage(tmp_path))
        await asyncio.gather(*(one.save({"w": np.ones(n)}, options=SaveOptions(f"c{n}")) for n in range(3)))

    asyncio.run(both())
    for n in range(3):
        assert same(forged.checkpoint.load(tmp_path / f"c{n}")["model"], {"w": np.ones(n)})
