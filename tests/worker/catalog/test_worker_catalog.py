"""The catalogue as workers use it, at a real daemon in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forged.catalog.messages import (
    CheckpointFailed,
    CheckpointRestored,
    CheckpointsAbandoned,
    CheckpointStarted,
    ListCheckpoints,
    ReportRestore,
)
from forged.catalog.model import CheckpointMeta, CheckpointState
from forged.checkpoint import BlockingCheckpoint, Checkpoints, DistributedCheckpoint, SaveOptions
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.client import BlockingClient
from forged.worker.blocking import Training
from forged.worker.catalog.worker_catalog import WorkerCatalog
from tests.checkpoint.fixtures.faulty_storage import FaultyStorage, on
from tests.checkpoint.test_run_checkpoints import flip_byte
from tests.client.conftest import threaded_daemon
from tests.client.threaded_daemon import ThreadedDaemon
from tests.worker.test_blocking import Scripts, client, endpoint, learn, past, scripts
from tests.worker.trainers import JOB, PATIENCE_S, chain_after, config

__all__ = ["client", "endpoint", "scripts", "threaded_daemon"]

FOLDER = "checkpoints of a run"


def until(true: Callable[[], bool]) -> None:
    """Wait until the daemon has heard what workers report in the background."""
    moment = threading.Event()
    for _ in range(round(PATIENCE_S / 0.01)):
        if true():
            return
        moment.wait(0.01)
    raise AssertionError("it did not happen")


def known(client: BlockingClient) -> dict[int, CheckpointMeta]:
    """The catalogue's checkpoints by step; of several of one step the newest."""
    return {meta.step: meta for meta in reversed(client.checkpoints(JOB))}


def states(client: BlockingClient) -> dict[int, CheckpointState]:
    return {step: meta.state for step, meta in sorted(known(client).items())}


def training(folder: Path, until: int, **settings: Any) -> Callable[[Training], int]:
    """A script that resumes, and saves every third step."""

    def train(worker: Training) -> int:
        with Checkpoints(folder, **({"every": 3} | settings), ranks=worker) as checkpoints:
            start = checkpoints.resume(worker.state)
            for step in worker.steps(until):
                with step:
                    checkpoints.save(step, worker.state, metrics={"loss": 1.0 / (step + 1)})
                    learn(worker, step)
        assert int(worker.state["chain"][0]) == chain_after(worker.step)
        return start

    return train


class Crashed(Exception):
    """A script has died."""


def crash(scripts: Scripts, names: str, folder: Path, at: int) -> None:
    """Run workers that save every third step, and die in the same step."""
    together = threading.Barrier(len(names))

    def train(worker: Training) -> None:
        with Checkpoints(folder, every=3, ranks=worker) as checkpoints:
            checkpoints.resume(worker.state)
            for step in worker.steps():
                with step:
                    checkpoints.save(step, worker.state, metrics={"loss": 1.0 / (step + 1)})
                    if step == at:
                        together.wait(60)
                        raise Crashed
                    learn(worker, step)

    started = [scripts.start(name, train, config=config(min_workers=len(names))) for name in names]
    for future in started:
        with pytest.raises(Crashed):
            future.result(60)


def run(scripts: Scripts, names: str, script: Callable[[Training], Any]) -> list[Any]:
    """Run a script with workers of these names together; what each of them returns."""
    started = [scripts.start(name, script, config=config(min_workers=len(names))) for name in names]
    return [future.result(60) for future in started]


class TestSaves:
    @pytest.mark.parametrize("in_background", [False, True])
    def test_saves_appear_with_states_sizes_and_reasons(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path, in_background: bool
    ) -> None:
        run(scripts, "ab", training(tmp_path, 10, in_background=in_background))
        until(lambda: states(client) == dict.fromkeys((3, 6, 9), CheckpointState.COMPLETE))
        storage = LocalStorage(tmp_path)
        for step, meta in known(client).items():
            manifest = listing.read_manifest(storage, f"step-{step:08d}")
            assert meta.storage_path == f"{storage.url}/step-{step:08d}"
            assert meta.size_bytes == manifest.size_bytes
            assert meta.metrics == {"loss": 1.0 / (step + 1)}
        started = past(client, CheckpointStarted)
        assert [fact.step for fact in started] == [3, 6, 9]
        assert {fact.reason for fact in started} == {"every 3 steps"}
        assert client.request(ListCheckpoints(JOB)).cadence == "every 3 steps"

    def test_distributed_checkpoint_is_catalogued_by_itself(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        def train(worker: Training) -> None:
            with BlockingCheckpoint(DistributedCheckpoint(worker, LocalStorage(tmp_path))) as one:
                for step in worker.steps(3):
                    with step:
                        if step == 1:
                            one.save(worker.state, options=SaveOptions("mine", metrics={"loss": 0.5}, reason="because"))
                        learn(worker, step)

        run(scripts, "a", train)
        until(lambda: states(client) == {1: CheckpointState.COMPLETE})
        assert known(client)[1].storage_path == f"{LocalStorage(tmp_path).url}/mine"
        assert [fact.reason for fact in past(client, CheckpointStarted)] == ["because"]

    def test_failed_save_is_recorded_with_its_reason(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        def train(worker: Training) -> None:
            storage = FaultyStorage(LocalStorage(tmp_path), on("publish"))
            one = BlockingCheckpoint(DistributedCheckpoint(worker, storage))
            for step in worker.steps(2):
                with step:
                    if step == 1:
                        with pytest.raises(CheckpointException):
                            one.save(worker.state, options=SaveOptions("mine"))
                    learn(worker, step)

        run(scripts, "a", train)
        until(lambda: len(past(client, CheckpointFailed)) == 1)
        assert "it is broken" in past(client, CheckpointFailed)[0].reason

    def test_saves_while_the_daemon_is_away_are_catalogued_afterwards(
        self, scripts: Scripts, threaded_daemon: ThreadedDaemon, tmp_path: Path
    ) -> None:
        saved, is_back = threading.Event(), threading.Event()

        def train(worker: Training) -> None:
            with Checkpoints(tmp_path, every=3, ranks=worker) as checkpoints:
                for step in worker.steps(8):
                    if step == 2:
                        threaded_daemon.call(threaded_daemon.runner.close)
                    if step == 7:
                        saved.set()
                        assert is_back.wait(60)
                    with step:
                        checkpoints.save(step, worker.state)
                        learn(worker, step)

        started = scripts.start("a", train, config=config())
        assert saved.wait(60)
        assert listing.prefixes(LocalStorage(tmp_path)) == ["step-00000003", "step-00000006"]
        threaded_daemon.call(threaded_daemon.runner.open)
        is_back.set()
        started.result(60)
        with threaded_daemon.client() as client:
            until(lambda: states(client) == dict.fromkeys((3, 6), CheckpointState.COMPLETE))


class TestIncrementalSaves:
    @pytest.mark.parametrize("shared", [1.0, 2.0])
    def test_base_is_kept_during_a_save_and_the_parent_is_that_of_the_manifest(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path, shared: float
    ) -> None:
        storage, is_publishing, may_publish = LocalStorage(tmp_path), threading.Event(), threading.Event()

        def pause(number: int, what: str, done: bool) -> None:
            if what == "publish" and not done:
                is_publishing.set()
                assert may_publish.wait(60)

        def train(worker: Training) -> None:
            plain = BlockingCheckpoint(DistributedCheckpoint(worker, storage))
            paused = BlockingCheckpoint(DistributedCheckpoint(worker, FaultyStorage(storage, pause)))
            saves = (plain, "a", None, 1.0), (plain, "b", "a", 1.0), (plain, "c", None, 1.0), (paused, "d", "b", shared)
            for step in worker.steps(5):
                with step:
                    if step:
                        checkpoint, name, base, value = saves[step - 1]
                        state = {"same": np.full(100_000, value), "other": np.full(100_000, 10.0 + step)}
                        checkpoint.save(state, options=SaveOptions(name, base=base, include_rng_state=False))
                    learn(worker, step)

        started = scripts.start("w", train, config=config())
        assert is_publishing.wait(60)
        until(lambda: list(states(client)) == [1, 2, 3, 4])
        saved = known(client)
        assert (saved[4].state, saved[4].parent_id) == (CheckpointState.CREATING, saved[2].checkpoint_id)
        job = client.job(JOB)
        client.change_job(JOB, {"checkpoint_keep": 1}, job.version)
        client.collect_checkpoints(JOB)
        assert listing.prefixes(storage) == ["a", "b", "c"]
        may_publish.set()
        started.result(60)
        # What "d" shares with its base "b" is in the files of "a".
        kept = {"a": None, "d": saved[1].checkpoint_id} if shared == 1.0 else {"d": None}
        until(lambda: listing.prefixes(storage) == list(kept))
        assert {Path(meta.storage_path).name: meta.parent_id for meta in known(client).values()} == kept
        links = [link.prefix for link in listing.read_manifest(storage, "d").links]
        assert links == (["a"] if shared == 1.0 else [])


class TestResume:
    def test_workers_report_what_they_continue_from(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        crash(scripts, "ab", tmp_path, 7)
        until(lambda: states(client) == dict.fromkeys((3, 6), CheckpointState.COMPLETE))
        newest = known(client)[6]
        assert run(scripts, "cd", training(tmp_path, 8)) == [6, 6]
        until(lambda: len(past(client, CheckpointRestored)) == 1)
        (restored,) = past(client, CheckpointRestored)
        assert (restored.checkpoint_id, restored.step, restored.skipped) == (newest.checkpoint_id, 6, [])
        assert 0 < restored.size_bytes <= newest.size_bytes
        assert restored.seconds > 0
        assert past(client, CheckpointsAbandoned) == []
        # Nobody reads it any more.
        until(lambda: known(client)[6].holders == ())

    def test_corrupt_checkpoint_is_reported_and_the_next_one_is_taken(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        crash(scripts, "a", tmp_path, 10)
        until(lambda: states(client) == dict.fromkeys((3, 6, 9), CheckpointState.COMPLETE))
        damaged = known(client)[9].checkpoint_id
        flip_byte(tmp_path, "step-00000009")
        crash(scripts, "b", tmp_path, 8)
        until(lambda: client.checkpoint(JOB, damaged).meta.abandoned)
        assert client.checkpoint(JOB, damaged).meta.state is CheckpointState.CORRUPTED
        (restored,) = past(client, CheckpointRestored)
        assert restored.step == 6
        assert restored.skipped[0].startswith("step-00000009: ")
        # The steps are repeated, and saved again beside the damaged one.
        assert run(scripts, "c", training(tmp_path, 10)) == [6]
        until(lambda: known(client)[9].state is CheckpointState.COMPLETE)
        best = client.restore_points(JOB).points[0].meta
        assert best.storage_path.endswith("/step-00000009-2")

    def test_abandoned_checkpoint_is_not_restored(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        crash(scripts, "a", tmp_path, 10)
        until(lambda: states(client) == dict.fromkeys((3, 6, 9), CheckpointState.COMPLETE))
        client.request(ReportRestore(JOB, "", b"", known(client)[6].checkpoint_id, 6, 1.0, 1))
        assert run(scripts, "b", training(tmp_path, 8)) == [6]

    def test_checkpoint_that_the_catalogue_does_not_know_is_restored_if_it_is_newer(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        crash(scripts, "a", tmp_path, 7)
        until(lambda: len(known(client)) == 2)
        state = scripts.trainings["a"].state
        with Checkpoints(tmp_path, logger=None) as alone:
            state["chain"][0], state["scratch"]["last"] = chain_after(12), 12
            state["scratch"]["many"][0][:] = 12
            alone.save(12, state)
        assert run(scripts, "b", training(tmp_path, 13)) == [12]

    def test_checkpoint_that_is_missing_in_the_folder_is_passed_over(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        crash(scripts, "a", tmp_path, 7)
        until(lambda: states(client) == dict.fromkeys((3, 6), CheckpointState.COMPLETE))
        listing.delete(LocalStorage(tmp_path), "step-00000006")
        assert run(scripts, "b", training(tmp_path, 5)) == [3]
        # Another host may have it.
        assert known(client)[6].state is CheckpointState.COMPLETE
        until(lambda: len(past(client, CheckpointRestored)) == 1)
        assert past(client, CheckpointRestored)[0].skipped == [
            "step-00000006: the catalogue has it, and the folder does not"
        ]

    def test_checkpoint_is_held_while_it_is_read(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        crash(scripts, "a", tmp_path, 4)
        until(lambda: states(client) == {3: CheckpointState.COMPLETE})
        checkpoint = known(client)[3].checkpoint_id

        def look(worker: Training) -> tuple[str, ...]:
            with worker.checkpoint_catalog.hold(checkpoint):
                return known(client)[3].holders

        assert run(scripts, "b", look) == [("b",)]
        until(lambda: known(client)[3].holders == ())


class TestMissingFolder:
    def test_resume_refuses_to_start_anew_where_no_checkpoint_is_left(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        """As with a folder that is not mounted: from step 0 on, all checkpoints would be abandoned, and go first."""
        folder, away = tmp_path / "run", tmp_path / "away"
        crash(scripts, "a", folder, 7)
        until(lambda: states(client) == dict.fromkeys((3, 6), CheckpointState.COMPLETE))
        folder.rename(away)
        with pytest.raises(CheckpointException, match="step-00000006, and none of them is there"):
            run(scripts, "b", training(folder, 9))
        away.rename(folder)
        assert run(scripts, "c", training(folder, 9)) == [6]
        assert not any(meta.abandoned for meta in client.checkpoints(JOB))

    def test_another_folder_starts_anew(self, scripts: Scripts, client: BlockingClient, tmp_path: Path) -> None:
        crash(scripts, "a", tmp_path / "run", 4)
        until(lambda: states(client) == {3: CheckpointState.COMPLETE})
        assert run(scripts, "b", training(tmp_path / "other", 5)) == [0]


class TestKeep:
    def test_daemon_keeps_as_many_as_the_script_and_what_is_pinned(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        def train(worker: Training) -> None:
            with Checkpoints(tmp_path, every=3, keep=2, ranks=worker) as checkpoints:
                for step in worker.steps(13):
                    if step == 4:
                        until(lambda: states(client) == {3: CheckpointState.COMPLETE})
                        client.pin_checkpoint(JOB, known(client)[3].checkpoint_id)
                    with step:
                        checkpoints.save(step, worker.state)
                        learn(worker, step)

        run(scripts, "ab", train)
        kept = ["step-00000003", "step-00000009", "step-00000012"]
        until(lambda: listing.prefixes(LocalStorage(tmp_path)) == kept)
        assert list(states(client)) == [3, 9, 12]

    def test_worker_asks_before_it_deletes_what_an_earlier_worker_has_saved(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        crash(scripts, "a", tmp_path, 7)
        until(lambda: states(client) == dict.fromkeys((3, 6), CheckpointState.COMPLETE))
        client.pin_checkpoint(JOB, known(client)[3].checkpoint_id)
        # The answer did not come in time.
        monkeypatch.setattr(WorkerCatalog, "find_restore_points", lambda self, folder: None)
        assert run(scripts, "b", training(tmp_path, 13, keep=1)) == [6]
        until(lambda: listing.prefixes(LocalStorage(tmp_path)) == ["step-00000003", "step-00000012"])

    def test_setting_of_the_job_overrules_the_script(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        client.create_job(JOB, config().to_settings() | {"checkpoint_keep": 3})

        def train(worker: Training) -> None:
            with Checkpoints(tmp_path, every=2, keep=1, ranks=worker) as checkpoints:
                for step in worker.steps(11):
                    with step:
                        checkpoints.save(step, worker.state)
                        learn(worker, step)

        scripts.start("a", train, config=None).result(60)
        until(lambda: listing.prefixes(LocalStorage(tmp_path)) == [f"step-{step:08d}" for step in (6, 8, 10)])

    def test_worker_deletes_what_it_has_not_reported_while_the_daemon_is_away(
        self, scripts: Scripts, threaded_daemon: ThreadedDaemon, tmp_path: Path
    ) -> None:
        def train(worker: Training) -> list[str]:
            with (
                Checkpoints(tmp_path, every=1, keep=2, ranks=worker) as checkpoints,
                threaded_daemon.client() as client,
            ):
                for step in worker.steps(10):
                    if step == 3:
                        until(lambda: states(client) == dict.fromkeys((1, 2), CheckpointState.COMPLETE))
                        threaded_daemon.call(threaded_daemon.runner.close)
                    with step:
                        checkpoints.save(step, worker.state)
                        learn(worker, step)
                    if step == 8:
                        found = listing.prefixes(LocalStorage(tmp_path))
                        threaded_daemon.call(threaded_daemon.runner.open)
            return found

        found = scripts.start("a", train, config=config()).result(60)
        # One report may have been under way when the daemon was lost.
        assert (
            {f"step-{step:08d}" for step in (1, 2, 7, 8)}
            <= set(found)
            <= {f"step-{step:08d}" for step in (1, 2, 3, 7, 8)}
        )
        with threaded_daemon.client() as client:
            until(lambda: listing.prefixes(LocalStorage(tmp_path)) == ["step-00000008", "step-00000009"])
            until(lambda: states(client) == dict.fromkeys((8, 9), CheckpointState.COMPLETE))


class TestCadence:
    def test_workers_save_by_time_at_the_same_steps_over_a_change_of_the_world(
        self, scripts: Scripts, client: BlockingClient, tmp_path: Path
    ) -> None:
        """Rank 0 leaves; its successor continues."""
        reached = threading.Event()

        def train(worker: Training) -> list[str]:
            names, shared = [], 0
            with Checkpoints(tmp_path, every_seconds=0.2, ranks=worker) as checkpoints:
                for step in worker.steps():
                    with step:
                        name = checkpoints.save(step, worker.state)
                        if name is not None:
                            names.append(name)
                        learn(worker, step)
                        size = worker.world_size
                    shared += name is not None and size == 2
                    if worker.worker_id.id == "a" and shared >= 2 and not reached.is_set():
                        reached.set()
                        worker.drain("it has done enough")
                    if worker.worker_id.id == "b" and reached.is_set() and size == 1 and len(names) >= shared + 2:
                        break
            return names

        settings = config(min_workers=1)
        first = scripts.start("a", train, config=settings)
        second = scripts.start("b", train, config=settings)
        by_first, by_second = first.result(60), second.result(60)
        assert set(by_first) & set(by_second)
        until(lambda: all(meta.state is CheckpointState.COMPLETE for meta in client.checkpoints(JOB)))
        saved = {Path(meta.storage_path).name for meta in client.checkpoints(JOB)}
        assert saved >= {*by_first, *by_second}
        reasons = {fact.reason for fact in past(client, CheckpointStarted)}
        assert "every 0.2 s" in reasons
        assert client.request(ListCheckpoints(JOB)).cadence
