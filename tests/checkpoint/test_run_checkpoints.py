"""The checkpoints of a training run: saved, resumed from, superseded."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forged.checkpoint
from forged.checkpoint import (
    AsyncCheckpoints,
    CheckpointException,
    Checkpoints,
    CheckpointStorage,
    PerRank,
    ShardedArray,
    latest,
)
from forged.checkpoint.loading.loader import load_state
from forged.checkpoint.ports import is_held
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.files import SystemFiles
from forged.checkpoint.storage.local import LocalStorage
from forged.checkpoint.storage.locations import root_at
from tests.checkpoint.fixtures.faulty_storage import FaultyStorage, broken, on
from tests.checkpoint.fixtures.s3_server import S3Server
from tests.checkpoint.fixtures.unreliable_ranks import UnreliableRank, group
from tests.telemetry.recording_log import RecordingLog

HEADER_BYTES = 4096


class Model:
    """An object with a state, as a model or an optimizer is one."""

    def __init__(self, value: float) -> None:
        self.weights = np.full(100, value)
        self.updates = int(value)
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: Any) -> None:
        self.loads += 1
        self.weights, self.updates = state["weights"], state["updates"]


def state_after(step: int) -> dict[str, Any]:
    return {"w": np.full(1000, float(step)), "nested": {"step": step, "list": [np.full(3, step), step]}}


def is_after(step: int, state: dict[str, Any]) -> bool:
    nested = state["nested"]
    return (
        bool((state["w"] == step).all())
        and (nested["step"], nested["list"][1]) == (step, step)
        and bool((nested["list"][0] == step).all())
    )


def saved(where: Any, *steps: int, **settings: Any) -> list[str | None]:
    """Save these steps of a run; the names of their checkpoints."""
    with Checkpoints(where, **settings) as checkpoints:
        return [checkpoints.save(step, state_after(step)) for step in steps]


def resumed(where: Any, **settings: Any) -> tuple[int, dict[str, Any]]:
    """Resume in a new process, as it were; the step and the state."""
    state = state_after(0)
    with Checkpoints(where, **settings) as checkpoints:
        return checkpoints.resume(state), state


def names_in(where: Any) -> list[str]:
    return listing.prefixes(root_at(where))


def parts(folder: Path, name: str) -> list[Path]:
    return sorted((folder / name).glob("*.safetensors"))


def remove_part(folder: Path, name: str) -> None:
    parts(folder, name)[0].unlink()


def cut_part(folder: Path, name: str) -> None:
    path = parts(folder, name)[0]
    path.write_bytes(path.read_bytes()[:-1])


def flip_byte(folder: Path, name: str, part: int = 0) -> None:
    """Damage the first array of a part."""
    path = parts(folder, name)[part]
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 3] ^= 1
    path.write_bytes(data)


def cut_manifest(folder: Path, name: str) -> None:
    path = folder / f"{name}.metadata.json"
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES = [remove_part, cut_part, flip_byte, cut_manifest]


# Saving and resuming.


def test_run_resumes_from_its_newest_checkpoint(tmp_path: Path) -> None:
    assert saved(tmp_path, *range(1, 8), every=3) == [None, None, "step-00000003", None, None, "step-00000006", None]
    step, state = resumed(tmp_path)
    assert step == 6
    assert is_after(6, state)


def test_run_without_checkpoints_starts_at_step_zero(tmp_path: Path) -> None:
    step, state = resumed(tmp_path / "none")
    assert step == 0
    assert is_after(0, state)
    assert not (tmp_path / "none").exists()


def test_resumed_state_is_filled_in_place(tmp_path: Path) -> None:
    model, optimizer = Model(7.0), Model(8.0)
    history = [1, 2]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, {"model": model, "all": [optimizer], "history": history, "pair": (np.ones(2), 4)})
    fresh, inner, numbers, array = Model(0.0), Model(0.0), [0, 0], np.zeros(2)
    state: dict[str, Any] = {"model": fresh, "all": [inner], "history": numbers, "pair": (array, 0)}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.resume(state) == 5
    assert (fresh.updates, inner.updates, fresh.loads, inner.loads) == (7, 8, 1, 1)
    assert (fresh.weights == 7).all()
    assert state["model"] is fresh
    assert numbers == [1, 2]
    assert (array == 1).all()
    assert state["pair"][1] == 4


def test_state_may_be_an_object(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, Model(7.0))
    model = Model(0.0)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.resume(model) == 1
    assert model.updates == 7


def test_per_rank_value_stays_one_after_a_resume(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"own": PerRank({"x": np.ones(2), "n": 3})})
    state: dict[str, Any] = {"own": PerRank({"x": np.zeros(2), "n": 0})}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.resume(state)
    assert isinstance(state["own"], PerRank)
    assert state["own"].value["n"] == 3
    assert (state["own"].value["x"] == 1).all()


def test_random_generators_continue_after_a_resume(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    with Checkpoints(tmp_path, generators={"mine": generator}) as checkpoints:
        checkpoints.save(1, state_after(1))
    expected = random.random(), np.random.random(), generator.random()
    with Checkpoints(tmp_path, generators={"mine": generator}) as checkpoints:
        checkpoints.resume(state_after(0))
    assert (random.random(), np.random.random(), generator.random()) == expected


def test_resumed_step_is_not_saved_again(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10)
    with Checkpoints(tmp_path, every=5) as checkpoints:
        start = checkpoints.resume(state_after(0))
        assert [checkpoints.save(step, state_after(step)) for step in range(start, 16)] == [
            "step-00000010",
            *[None] * 4,
            "step-00000015",
        ]
    assert names_in(tmp_path) == ["step-00000005", "step-00000010", "step-00000015"]


def test_force_saves_a_step_that_is_not_due(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=100) as checkpoints:
        assert checkpoints.save(0, state_after(0), force=True) == "step-00000000"
        assert checkpoints.save(7, state_after(7), force=True) == "step-00000007"
    assert resumed(tmp_path)[0] == 7


@pytest.mark.parametrize(("step", "every", "is_due"), [(0, 1, False), (1, 1, True), (3, 2, False), (4, 2, True)])
def test_every_so_many_steps_one_is_due(step: int, every: int, is_due: bool, tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, every=every).is_due(step) == is_due


@pytest.mark.parametrize("settings", [{"every": 0}, {"keep": 0}, {"every": 1.5}, {"keep": True}, {"keep": -1}])
def test_invalid_setting_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="must be"):
        Checkpoints(tmp_path, **settings)


def test_killed_run_resumes_from_the_last_step_that_it_reported(tmp_path: Path) -> None:
    """Killed at any moment, also while it deletes: nothing that was saved is lost."""
    script = textwrap.dedent(
        """
        import sys
        import numpy as np
        from forged.checkpoint import Checkpoints

        state = {"w": np.zeros(400), "step": 0}
        with Checkpoints(sys.argv[1], keep=2) as checkpoints:
            step = checkpoints.resume(state)
            assert (state["w"] == step).all() and state["step"] == step
            while True:
                step += 1
                state["w"] += 1
                state["step"] = step
                checkpoints.save(step, state)
                print(step, flush=True)
        """
    )
    reported = 0
    for saves in (1, 2, 5, 9):
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            lines = [running.stdout.readline() for _ in range(saves)]
            running.kill()
            # Not `communicate`, which leaves out what `readline` has buffered.
            rest, errors = running.stdout.read(), running.stderr.read()
        assert "" not in lines, errors
        # The checkpoint of the step that was not reported any more may exist.
        assert int(lines[0]) in {reported + 1, reported + 2}
        reported = int([*lines, *rest.split("\n")[:-1]][-1])
        state = {"w": np.zeros(400), "step": 0}
        assert Checkpoints(tmp_path).resume(state) in {reported, reported + 1}


def test_run_continues_where_the_script_was_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, sys
        import numpy as np
        from forged.checkpoint import Checkpoints

        state = {"w": np.zeros(4)}
        with Checkpoints(sys.argv[1], every=5, keep=2) as checkpoints:
            start = checkpoints.resume(state)
            for step in range(start, 23):
                checkpoints.save(step, state)
                if step == int(sys.argv[2]):
                    os._exit(9)
                state["w"] += 1
        print(start, *state["w"])
        """
    )
    for killed_at in (3, 13, 14):
        killed = subprocess.run([sys.executable, "-c", script, str(tmp_path), str(killed_at)])
        assert killed.returncode == 9
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), "-1"], capture_output=True, text=True)
    assert done.stdout == "10 23.0 23.0 23.0 23.0\n", done.stderr
    assert names_in(tmp_path) == ["step-00000015", "step-00000020"]


# After lost progress.


def test_step_that_an_earlier_process_has_saved_is_saved_under_a_name_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10)
    assert saved(tmp_path, 5) == ["step-00000005-2"]
    assert resumed(tmp_path)[0] == 10
    assert saved(tmp_path, 10) == ["step-00000010-2"]
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.latest()
    assert found is not None
    assert found.prefix == "step-00000010-2"


def test_same_step_saved_twice_by_one_process_is_saved_once(tmp_path: Path) -> None:
    assert saved(tmp_path, 5, 5) == ["step-00000005"] * 2
    assert names_in(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize("in_background", [False, True])
def test_processes_that_save_the_same_step_at_once_do_not_fail(in_background: bool, tmp_path: Path) -> None:
    """Each worker saves by itself: one wins, and none is ended by an error."""
    script = textwrap.dedent(
        f"""
        import sys
        import numpy as np
        from forged.checkpoint import Checkpoints

        with Checkpoints(sys.argv[1], in_background={in_background}) as checkpoints:
            for step in range(1, 6):
                checkpoints.save(step, {{"w": np.full(10, step)}})
        """
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    state = {"w": np.zeros(10, np.int64)}
    assert Checkpoints(tmp_path).resume(state) == 5
    assert (state["w"] == 5).all()


# Damaged checkpoints.


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_skipped_with_a_warning(damage: Callable[[Path, str], None], tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    damage(tmp_path, "step-00000003")
    log = RecordingLog()
    step, state = resumed(tmp_path, logger=log)
    assert step == 2
    assert is_after(2, state)
    [warning] = log.of("checkpoint skipped: it cannot be restored")
    assert warning["prefix"] == "step-00000003"
    assert warning["reason"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_resume_raises_if_all_checkpoints_are_damaged(damage: Callable[[Path, str], None], tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path, "step-00000001")
    damage(tmp_path, "step-00000002")
    with pytest.raises(CheckpointException, match=r"no checkpoint in .* can be restored: step-00000002") as caught:
        resumed(tmp_path)
    assert caught.value.code == "checkpoint_none_restorable"
    assert "step-00000001" in caught.value.message
    assert caught.value.fix


def test_step_of_a_damaged_checkpoint_is_saved_again_after_a_resume(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    flip_byte(tmp_path, "step-00000002")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.resume(state_after(0)) == 1
        assert checkpoints.save(2, state_after(2)) == "step-00000002-2"
    step, state = resumed(tmp_path)
    assert step == 2
    assert is_after(2, state)


def test_state_of_another_shape_is_refused_and_no_older_checkpoint_is_taken(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    with pytest.raises(CheckpointException, match="state differs"):
        Checkpoints(tmp_path).resume({"w": np.zeros(3)})


def test_checkpoint_deleted_during_the_load_is_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process saves a newer checkpoint and deletes the one that is about to be loaded."""
    saved(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path)
    load = checkpoints.aio._checkpoint.load

    async def load_late(*args: Any, **kwargs: Any) -> Any:
        if names_in(tmp_path) == ["step-00000001"]:
            saved(tmp_path, 2, keep=1)
        return await load(*args, **kwargs)

    monkeypatch.setattr(checkpoints.aio._checkpoint, "load", load_late)
    state = state_after(0)
    assert checkpoints.resume(state) == 2
    assert is_after(2, state)


def test_unavailable_storage_is_an_error_and_no_reason_to_take_an_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 2)
    faulty = FaultyStorage(root_at(tmp_path), on("open"))
    monkeypatch.setattr("forged.checkpoint.run_checkpoints.root_at", lambda where: faulty)
    with pytest.raises(CheckpointException, match="it is broken"):
        resumed(tmp_path)


# Keeping.


def test_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, *range(1, 8), keep=3)
    assert names_in(tmp_path) == ["step-00000005", "step-00000006", "step-00000007"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == names_in(tmp_path)


def test_checkpoints_of_other_names_are_kept(tmp_path: Path) -> None:
    forged.checkpoint.save(tmp_path / "best", state_after(1))
    forged.checkpoint.save(tmp_path / "step-100", state_after(1), step=100)
    saved(tmp_path, 1, 2, keep=1)
    assert names_in(tmp_path) == ["best", "step-00000002", "step-100"]
    assert resumed(tmp_path)[0] == 2


@pytest.mark.parametrize("damage", [remove_part, cut_part, cut_manifest])
def test_damaged_checkpoints_do_not_count_among_the_kept(damage: Callable[[Path, str], None], tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    damage(tmp_path, "step-00000003")
    saved(tmp_path, 4, keep=2)
    assert names_in(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    flip_byte(tmp_path, "step-00000003")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.resume(state_after(0)) == 2
        checkpoints.save(4, state_after(4))
    assert names_in(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_run_that_went_back_deletes_nothing_that_it_may_need(tmp_path: Path) -> None:
    """The checkpoints beyond step 2 are damaged: what is saved now is the only thing that can be restored."""
    saved(tmp_path, 2, 3, 4)
    for name in ("step-00000003", "step-00000004"):
        flip_byte(tmp_path, name)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.resume(state_after(0)) == 2
        checkpoints.save(3, state_after(3))
    assert names_in(tmp_path) == ["step-00000003-2", "step-00000004"]
    assert resumed(tmp_path)[0] == 3


READS = """
import sys
import forged.checkpoint

with forged.checkpoint.view(sys.argv[1]) as view:
    print("reading", flush=True)
    sys.stdin.read()
    assert (view["model/w"] == 1).all()
"""


def test_checkpoint_that_another_process_reads_is_deleted_only_after_that(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    command = [sys.executable, "-c", READS, str(tmp_path / "step-00000001")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        saved(tmp_path, 2, 3, keep=1)
        assert names_in(tmp_path) == ["step-00000001", "step-00000003"]
        reader.communicate()
    assert reader.returncode == 0
    saved(tmp_path, 4, keep=1)
    assert names_in(tmp_path) == ["step-00000004"]


def test_checkpoint_is_held_while_it_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    held = []

    class Observed(SystemFiles):
        def read(self, fd: int, rooms: Sequence[memoryview], offset: int) -> int:
            if offset >= HEADER_BYTES:
                held.append(is_held(root_at(tmp_path), "step-00000001.metadata.json"))
            return super().read(fd, rooms, offset)

    storage = LocalStorage(tmp_path, files=Observed())
    manifest = listing.read_manifest(storage, "step-00000001")
    held.clear()
    load_state(storage, manifest)
    assert held
    assert all(held)
    assert not is_held(storage, manifest.path)


def test_checkpoint_that_cannot_be_deleted_fails_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage: CheckpointStorage = FaultyStorage(root_at(tmp_path), on("move"))
    monkeypatch.setattr("forged.checkpoint.run_checkpoints.root_at", lambda where: storage)
    log = RecordingLog()
    assert saved(tmp_path, 1, 2, keep=1, logger=log) == ["step-00000001", "step-00000002"]
    [warning] = log.of("could not delete old checkpoints")
    assert "it is broken" in warning["reason"]


def test_failed_save_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)
    storage = FaultyStorage(root_at(tmp_path), on("write", error=broken))
    monkeypatch.setattr("forged.checkpoint.run_checkpoints.root_at", lambda where: storage)
    with pytest.raises(CheckpointException, match="it is broken"):
        saved(tmp_path, 2, keep=1)
    assert names_in(tmp_path) == ["step-00000001"]


# In the background.


def test_background_saves_are_committed_and_superseded_at_the_end(tmp_path: Path) -> None:
    assert saved(tmp_path, 1, 2, 3, keep=2, in_background=True) == [f"step-0000000{step}" for step in (1, 2, 3)]
    assert names_in(tmp_path) == ["step-00000002", "step-00000003"]
    step, state = resumed(tmp_path)
    assert step == 3
    assert is_after(3, state)


def test_failure_of_a_background_save_is_raised_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FaultyStorage(root_at(tmp_path), on("write", error=broken))
    monkeypatch.setattr("forged.checkpoint.run_checkpoints.root_at", lambda where: storage)
    checkpoints = Checkpoints(tmp_path, in_background=True)
    checkpoints.save(1, state_after(1))
    with pytest.raises(CheckpointException, match="it is broken"):
        checkpoints.close()


def rank_gone() -> CheckpointException:
    return CheckpointException("rank 1 (b) left before the save was complete", code="checkpoint_rank_gone")


def test_background_save_that_lost_a_rank_does_not_fail_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survivors of a world go on to save."""
    log = RecordingLog()
    failing = FaultyStorage(root_at(tmp_path), on("write", error=rank_gone))
    with monkeypatch.context() as patch:
        patch.setattr("forged.checkpoint.run_checkpoints.root_at", lambda where: failing)
        checkpoints = Checkpoints(tmp_path, in_background=True, logger=log)
    assert checkpoints.save(1, state_after(1)) == "step-00000001"
    with pytest.raises(CheckpointException):
        checkpoints.aio._saves.handles[0]._committed.result(60)
    failing._fault = lambda number, what, done: None
    assert checkpoints.save(2, state_after(2)) == "step-00000002"
    checkpoints.close()
    assert names_in(tmp_path) == ["step-00000002"]
    assert "rank 1 (b) left" in log.of("a checkpoint was not saved")[-1]["reason"]


def test_step_whose_background_save_has_failed_is_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FaultyStorage(root_at(tmp_path), on("write", error=rank_gone))
    with monkeypatch.context() as patch:
        patch.setattr("forged.checkpoint.run_checkpoints.root_at", lambda where: failing)
        checkpoints = Checkpoints(tmp_path, in_background=True, logger=None)
    checkpoints.save(1, state_after(1))
    with pytest.raises(CheckpointException):
        checkpoints.aio._saves.handles[0]._committed.result(60)
    failing._fault = lambda number, what, done: None
    assert checkpoints.save(1, state_after(1)) == "step-00000001"
    checkpoints.close()
    assert resumed(tmp_path)[0] == 1


def test_background_save_that_lost_a_rank_does_not_fail_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FaultyStorage(root_at(tmp_path), on("write", error=rank_gone))
    monkeypatch.setattr("forged.checkpoint.run_checkpoints.root_at", lambda where: failing)
    log = RecordingLog()
    assert saved(tmp_path, 1, in_background=True, logger=log) == ["step-00000001"]
    assert log.of("a checkpoint was not saved")


# Several ranks.


async def each(where: Path, act: Callable[[AsyncCheckpoints, int], Awaitable[Any]], size: int, **settings: Any) -> Any:
    """What every rank returns."""

    async def with_rank(rank: UnreliableRank) -> Any:
        async with AsyncCheckpoints(where, ranks=rank, **settings) as checkpoints:
            return await act(checkpoints, rank.rank)

    return await group(size, with_rank)


def sharded(rank: int, size: int, value: float) -> dict[str, Any]:
    rows = 12 // size
    return {"rows": ShardedArray(np.full((rows, 4), value), (12, 4), (rank * rows, 0)), "copied": np.full(5, value)}


@pytest.mark.parametrize("in_background", [False, True])
async def test_ranks_save_and_resume_together_with_another_number_of_ranks(in_background: bool, tmp_path: Path) -> None:
    async def save(checkpoints: AsyncCheckpoints, rank: int) -> list[str | None]:
        return [await checkpoints.save(step, sharded(rank, 3, float(step)), epoch=step // 2) for step in (1, 2, 3)]

    async def resume(checkpoints: AsyncCheckpoints, rank: int) -> tuple[int, float]:
        state = sharded(rank, 2, 0.0)
        step = await checkpoints.resume(state)
        assert (state["copied"] == step).all()
        return step, state["rows"].local.mean()

    names = ["step-00000001", "step-00000002", "step-00000003"]
    assert await each(tmp_path, save, 3, keep=2, in_background=in_background) == [names] * 3
    assert names_in(tmp_path) == names[1:]
    assert await each(tmp_path, resume, 2) == [(3, 3.0)] * 2


async def test_part_that_one_rank_cannot_read_makes_all_ranks_resume_from_the_next(tmp_path: Path) -> None:
    async def save(checkpoints: AsyncCheckpoints, rank: int) -> None:
        for step in (1, 2):
            await checkpoints.save(step, sharded(rank, 2, float(step)))

    async def resume(checkpoints: AsyncCheckpoints, rank: int) -> tuple[int, float]:
        state = sharded(rank, 2, 0.0)
        return await checkpoints.resume(state), state["rows"].local.mean()

    await each(tmp_path, save, 2)
    flip_byte(tmp_path, "step-00000002", part=1)
    assert await each(tmp_path, resume, 2) == [(1, 1.0)] * 2


async def test_rank_without_a_world_is_refused(tmp_path: Path) -> None:
    class Waiting(UnreliableRank):
        pass

    async def with_rank(rank: UnreliableRank) -> Any:
        rank.rank = -1
        await AsyncCheckpoints(tmp_path, ranks=rank).save(1, {})

    [error] = await group(1, with_rank)
    assert isinstance(error, CheckpointException)
    assert error.code == "checkpoint_no_world"


# Object stores.


@pytest.fixture(params=["memory", "s3"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a folder in an object store."""
    if request.param == "memory":
        yield f"memory://run-{random.SystemRandom().getrandbits(64):x}/folder"
        return
    server: S3Server = request.getfixturevalue("s3_server")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    yield f"s3://{server.bucket()}/run"


def test_run_resumes_from_an_object_store(bucket: str) -> None:
    saved(bucket, 1, 2, 3, keep=2)
    assert names_in(bucket) == ["step-00000002", "step-00000003"]
    storage = root_at(bucket)
    storage.delete([entry.name for entry in storage.entries("step-00000003/")])
    step, state = resumed(bucket)
    assert step == 2
    assert is_after(2, state)
    found = latest(bucket)
    assert found is not None
    assert (found.prefix, found.step) == ("step-00000002", 2)


# The newest checkpoint of a folder.


def test_latest_orders_by_epoch_step_and_time(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    numbers = {"d": (7, 2), "c": (9, 1), "b": (8, 1), "a": (9, None), "z": (None, None)}
    for name, (step, epoch) in numbers.items():
        forged.checkpoint.save(tmp_path / name, {}, step=step, epoch=epoch)
    order = []
    while (found := latest(tmp_path)) is not None:
        order.append(found.prefix)
        listing.delete(root_at(tmp_path), found.prefix)
    assert order == ["d", "c", "b", "a", "z"]


@pytest.mark.parametrize("damage", [remove_part, cut_part, cut_manifest])
def test_latest_skips_damaged_checkpoints(damage: Callable[[Path, str], None], tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path, "step-00000002")
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 1
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == found
    shutil.rmtree(tmp_path)
    assert latest(tmp_path) is None


def test_metrics_of_a_save_are_in_its_manifest(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state_after(3), metrics={"loss": 0.25})
    assert listing.read_manifest(root_at(tmp_path), "step-00000003").custom == {"metrics": {"loss": 0.25}}


# When time decides.


class Ticking:
    """A clock that a script's steps move on."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


async def trained(checkpoints: AsyncCheckpoints, clock: Ticking, steps: int, step_s: float) -> list[int]:
    """Save in steps of so many seconds; the steps that were saved."""
    done = []
    for step in range(steps):
        if checkpoints.is_due(step) and await checkpoints.save(step, state_after(step)):
            done.append(step)
        clock.now += step_s
    await checkpoints.close()
    return done


async def test_run_saves_after_so_many_seconds(tmp_path: Path) -> None:
    clock = Ticking()
    one = AsyncCheckpoints(tmp_path, every_seconds=10.0, monotonic=clock)
    assert await trained(one, clock, 40, 1.0) == [10, 20, 30]
    both = AsyncCheckpoints(tmp_path / "both", every=7, every_seconds=5.0, monotonic=clock)
    assert await trained(both, clock, 20, 1.0) == [5, 7, 12, 14, 19]


@pytest.mark.parametrize("in_background", [False, True])
async def test_automatic_run_saves_by_what_saves_cost(tmp_path: Path, in_background: bool) -> None:
    clock = Ticking()
    one = AsyncCheckpoints(tmp_path, automatic=True, in_background=in_background, monotonic=clock)
    first, *rest = await trained(one, clock, 60, 1.0)
    # The clock stands still during saves, so they cost nothing, and the shortest interval holds.
    assert (first, rest) == (10, [20, 30, 40, 50])


async def test_resumed_run_waits_for_the_next_interval(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    clock = Ticking()
    async with AsyncCheckpoints(tmp_path, every_seconds=10.0, monotonic=clock) as one:
        clock.now += 100.0
        assert await one.resume(state_after(0)) == 5
        names = []
        for step in range(5, 20):
            names.append(await one.save(step, state_after(step)))
            clock.now += 1.0
    assert [name for name in names if name] == ["step-00000015"]


async def test_ranks_save_the_same_steps_with_few_questions(tmp_path: Path) -> None:
    async def act(rank: UnreliableRank) -> tuple[list[int], int]:
        clock = Ticking()
        # The clocks of other ranks than 0 do not count.
        clock.now *= 1 + rank.rank
        one = AsyncCheckpoints(tmp_path, every_seconds=4.0, ranks=rank, monotonic=clock)
        done = []
        for step in range(400):
            if await one.save(step, state_after(step), force=False):
                done.append(step)
            clock.now += 0.025 * (1 + 3 * rank.rank)
        await one.close()
        return done, rank._calls

    outcomes = await group(2, act)
    assert all(isinstance(outcome, tuple) for outcome in outcomes), outcomes
    (first, calls), (second, _) = outcomes  # type: ignore[misc]
    assert first == second
    assert len(first) == 2
    # 10 s of steps; a save has 3 decisions of 2 calls.
    assert calls < 6 * 3 + 25


@pytest.mark.parametrize("settings", [{"every_seconds": 0}, {"every_seconds": -1.0}, {"every_seconds": "10"}])
def test_invalid_interval_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="every_seconds must be"):
        Checkpoints(tmp_path, **settings)


def test_every_step_is_due_unless_another_interval_is_set(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).is_due(1)
    with Checkpoints(tmp_path, every_seconds=1e6) as one:
        assert [one.save(step, state_after(step)) for step in range(3)] == [None] * 3


# Incremental checkpoints.


def rows_after(step: int) -> dict[str, Any]:
    """A state of which one chunk of 16 changes at each step."""
    rows = np.zeros((16, 1 << 14))
    for past in range(1, step + 1):
        rows[past % 16] = past
    return {"w": rows, "step": step}


def chains_in(where: Any) -> list[list[str]]:
    """The chains of all checkpoints, as numbers of steps."""
    storage = root_at(where)
    infos = [listing.info_of(listing.read_manifest(storage, name)) for name in names_in(where)]
    return [[prefix.removeprefix("step-").lstrip("0") for prefix in info.chain] for info in infos]


@pytest.mark.parametrize("in_background", [False, True])
def test_incremental_checkpoints_build_on_the_latest_one(tmp_path: Path, in_background: bool) -> None:
    with Checkpoints(tmp_path, incremental=True, chain_max=3, in_background=in_background) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, rows_after(step))
            for handle in checkpoints.aio._saves.handles:
                handle.result(60.0)
    assert chains_in(tmp_path) == [["1"], ["1", "2"], ["1", "2", "3"], ["4"], ["4", "5"]]
    for step in range(5, 0, -1):
        state = rows_after(0)
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.resume(state) == step
        assert (state["step"], state["w"].tobytes()) == (step, rows_after(step)["w"].tobytes())
        listing.delete(root_at(tmp_path), f"step-{step:08d}")


def test_incremental_checkpoints_continue_from_the_resumed_one(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, rows_after(1))
    with Checkpoints(tmp_path, incremental=True) as checkpoints:
        assert checkpoints.resume(rows_after(0)) == 1
        checkpoints.save(2, rows_after(2))
    with Checkpoints(tmp_path, incremental=True) as checkpoints:
        # This process has neither saved nor resumed a checkpoint.
        checkpoints.save(3, rows_after(3))
    assert chains_in(tmp_path) == [["1"], ["1", "2"], ["3"]]


def test_checkpoint_that_was_repaired_when_it_was_resumed_is_no_base(tmp_path: Path) -> None:
    log = RecordingLog()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, rows_after(1))
        checkpoints.save(2, rows_after(1) | {"step": 2})
    flip_byte(tmp_path, "step-00000002")
    with Checkpoints(tmp_path, incremental=True, logger=log) as checkpoints:
        assert checkpoints.resume(rows_after(0)) == 2
        assert "healthy copies were loaded instead" in str(log.lines)
        checkpoints.save(3, rows_after(3))
    assert chains_in(tmp_path)[-1] == ["3"]


def test_checkpoints_that_kept_ones_need_are_not_deleted(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, incremental=True, keep=1, chain_max=3) as checkpoints:
        kept = []
        for step in range(1, 6):
            checkpoints.save(step, rows_after(step))
            kept.append([name.removeprefix("step-").lstrip("0") for name in names_in(tmp_path)])
    assert kept == [["1"], ["1", "2"], ["1", "2", "3"], ["4"], ["4", "5"]]
    state = rows_after(0)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.resume(state) == 5
    assert state["w"].tobytes() == rows_after(5)["w"].tobytes()


def test_resume_tries_an_older_checkpoint_if_a_parent_was_deleted_by_hand(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, incremental=True, chain_max=3) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, rows_after(step))
    shutil.rmtree(tmp_path / "step-00000004")
    (tmp_path / "step-00000004.metadata.json").unlink()
    log, state = RecordingLog(), rows_after(0)
    with Checkpoints(tmp_path, logger=log) as checkpoints:
        assert checkpoints.resume(state) == 3
    assert state["w"].tobytes() == rows_after(3)["w"].tobytes()
    missing = "checkpoint step-00000005 needs step-00000004: that was deleted"
    events = [(event.partition(":")[0].partition(";")[0], fields) for _, event, fields in log.lines]
    assert events == [
        ("the check before the load has warnings", {"prefix": "step-00000005", "found": missing}),
        ("checkpoint skipped", {"prefix": "step-00000005", "reason": missing}),
        ("resumed from a checkpoint", {"prefix": "step-00000003", "step": 3, "skipped": "step-00000005"}),
    ]


def test_base_deleted_during_a_save_is_no_reason_to_end_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoints(tmp_path, incremental=True) as checkpoints:
        checkpoints.save(1, rows_after(1))
        publish = LocalStorage.publish

        def later(self: LocalStorage, name: str, data: bytes) -> None:
            if name.startswith("step-00000002") and "step-00000001" in names_in(tmp_path):
                listing.delete(self, "step-00000001")
            publish(self, name, data)

        monkeypatch.setattr(LocalStorage, "publish", later)
        checkpoints.save(2, rows_after(2))
    assert chains_in(tmp_path) == [["2"]]
