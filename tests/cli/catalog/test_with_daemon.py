"""The commands about the catalogue, against a real daemon."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forged.catalog.messages import ReportRestore
from forged.catalog.model import CheckpointType
from forged.checkpoint import Checkpoints
from tests.cli.catalog.conftest import JOB, CatalogueDaemon


def steps(on_daemon: CatalogueDaemon) -> list[int]:
    return [meta["step"] for meta in on_daemon.json("ls")["checkpoints"]]


def test_saved_checkpoints_are_listed_newest_first(on_daemon: CatalogueDaemon) -> None:
    on_daemon.save(100, metrics={"loss": 0.5})
    child = on_daemon.save(200, checkpoint_type=CheckpointType.INCREMENTAL, parent_path="/data/run/step-100")
    on_daemon.start(300)
    lines = on_daemon.lines("ls")
    assert [line.split()[1] for line in lines[1:4]] == ["300", "200", "100"]
    assert "creating" in lines[1]
    assert "incremental" in lines[2]
    assert child in lines[2]
    assert "loss 0.5" in lines[3]
    assert lines[5] == "3 checkpoints, 2 kB, in /data/run"


def test_list_of_many_checkpoints_has_all_pages(on_daemon: CatalogueDaemon) -> None:
    for step in range(1, 1202):
        on_daemon.start(step)
    assert steps(on_daemon) == list(range(1201, 0, -1))
    assert len(on_daemon.json("gc --dry-run")["verdicts"]) == 1201


def test_checkpoint_is_found_by_each_name(on_daemon: CatalogueDaemon) -> None:
    older, newer = on_daemon.save(100), on_daemon.save(200)
    for name, found in ((older, older), ("@100", older), ("latest", newer), (newer[:-1], None)):
        code, out, err = on_daemon.run(f"show {name} --json")
        if found:
            assert json.loads(out)["meta"]["checkpoint_id"] == found
        else:
            assert (code, json.loads(err)["error"]["code"]) == (3, "checkpoint_ambiguous")


def test_shown_checkpoint_names_its_chain(on_daemon: CatalogueDaemon) -> None:
    parent = on_daemon.save(100)
    child = on_daemon.save(200, checkpoint_type=CheckpointType.INCREMENTAL, parent_path="/data/run/step-100")
    assert f"builds on  {parent}" in on_daemon.lines(f"show {child}")
    shown = on_daemon.lines(f"show {parent}")
    assert f"needed by  {child}" in shown
    assert "files      read and deleted by the daemon" in shown


def test_restore_point_has_reason_estimate_and_alternatives(on_daemon: CatalogueDaemon) -> None:
    on_daemon.save(100)
    best = on_daemon.save(200)
    written = on_daemon.start(300).checkpoint_id
    lines = on_daemon.lines("restore-point")
    assert lines[0] == f"restore  {best} (step 200)"
    assert any(line.startswith("takes    ") and "assumed" in line for line in lines)
    assert f"  {written} (step 300): it is being written" in lines
    assert on_daemon.json("restore-point --max-step 150")["points"][0]["meta"]["step"] == 100
    assert on_daemon.run("restore-point --max-step 50")[0] == 1
    assert on_daemon.json("restore-point --folder /data/run/")["points"]
    assert on_daemon.run("restore-point --folder /elsewhere")[0] == 1


def test_estimate_names_its_source(on_daemon: CatalogueDaemon) -> None:
    on_daemon.save(100)
    [line] = on_daemon.lines("estimate latest")
    assert "a restore takes 50 ms" in line
    assert "assumed" in line


def test_pinned_checkpoint_survives_a_collection(on_daemon: CatalogueDaemon) -> None:
    for step in (100, 200, 300, 400):
        on_daemon.save(step)
    assert on_daemon.lines("pin @100")[0].startswith("pinned ")
    assert "complete, pinned" in on_daemon.lines("ls")[4]
    on_daemon.client.change_job(JOB, {"checkpoint_keep": 2}, 1)
    # The daemon may collect before the command does.
    on_daemon.lines("gc")
    assert steps(on_daemon) == [400, 300, 100]
    assert [verdict["rule"] for verdict in on_daemon.json("gc --dry-run")["verdicts"]] == ["newest", "recent", "pinned"]
    assert on_daemon.lines("unpin @100")[0].startswith("unpinned ")
    on_daemon.lines("gc")
    assert steps(on_daemon) == [400, 300]


def test_reinstated_checkpoint_is_offered_again(on_daemon: CatalogueDaemon) -> None:
    first = on_daemon.save(100)
    on_daemon.save(200)
    on_daemon.client.request(ReportRestore(JOB, "", b"", first, 100, 1.0, 1))
    assert "complete, abandoned" in on_daemon.lines("ls")[2]
    assert on_daemon.run("reinstate @100")[0] == 3
    assert on_daemon.lines("reinstate @200 --reason evaluated")[0].startswith("reinstated ")
    assert on_daemon.json("restore-point")["points"][0]["meta"]["step"] == 200


def test_deleted_checkpoint_is_no_longer_listed(on_daemon: CatalogueDaemon) -> None:
    on_daemon.save(100)
    on_daemon.save(200, checkpoint_type=CheckpointType.INCREMENTAL, parent_path="/data/run/step-100")
    code, _, err = on_daemon.run("rm @100 --yes")
    assert (code, "is needed by" in err) == (3, True)
    assert on_daemon.lines("rm @200 --yes")[0].startswith("deleted ")
    assert steps(on_daemon) == [100]


def test_checkpoints_of_a_folder_are_adopted_once(on_daemon: CatalogueDaemon, saved_folder: Path) -> None:
    assert on_daemon.lines(f"adopt {saved_folder} --dry-run")[0].startswith("job run would adopt 3 checkpoints")
    assert on_daemon.lines(f"adopt {saved_folder}")[0].startswith("job run has adopted 3 checkpoints")
    assert on_daemon.lines(f"adopt {saved_folder}")[0].startswith("known before: 3 checkpoints")
    assert on_daemon.lines(f"adopt {saved_folder} --dry-run")[0].startswith("known before: 3 checkpoints")
    paths = {meta["storage_path"] for meta in on_daemon.json("ls")["checkpoints"]}
    assert paths == {f"{saved_folder}/step-{step}" for step in (1, 2, 3)}


def test_incremental_checkpoints_are_adopted_with_their_parents(on_daemon: CatalogueDaemon, tmp_path: Path) -> None:
    state = {"frozen": np.zeros(1 << 20), "step": 0}
    with Checkpoints(tmp_path / "saved", incremental=True) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state | {"trained": np.full(1 << 20, step)})
    assert on_daemon.lines(f"adopt {tmp_path / 'saved'}")[0].startswith("job run has adopted 3 checkpoints")
    metas = {meta["step"]: meta for meta in on_daemon.json("ls")["checkpoints"]}
    assert [metas[step]["checkpoint_type"] for step in (1, 2, 3)] == ["full", "incremental", "incremental"]
    assert metas[2]["parent_id"] == metas[1]["checkpoint_id"]
    assert on_daemon.json("show latest")["is_restorable"]


def test_checkpoints_of_another_job_are_refused(on_daemon: CatalogueDaemon, saved_folder: Path) -> None:
    on_daemon.lines(f"adopt {saved_folder}")
    on_daemon.client.create_job("other")
    code, out, err = on_daemon.run(f"adopt {saved_folder}", job="other")
    assert (code, err) == (1, "")
    assert len(out.splitlines()) == 3
    assert out.startswith(f"refused: checkpoint '{saved_folder}/step-1' is in the catalogue of another job\n")


def test_folder_is_adopted_by_existing_jobs_only(on_daemon: CatalogueDaemon, saved_folder: Path) -> None:
    code, out, err = on_daemon.run(f"adopt {saved_folder}", job="nobody")
    assert (code, out) == (3, "")
    assert "nobody" in err


@pytest.mark.parametrize("line", ["ls", "restore-point", "gc --dry-run"])
def test_empty_catalogue_says_so(on_daemon: CatalogueDaemon, line: str) -> None:
    assert "job run has no checkpoint" in on_daemon.run(line)[1]


@pytest.mark.parametrize("line", ["ls", "restore-point", "gc --dry-run", "gc"])
def test_job_that_does_not_exist_is_refused(on_daemon: CatalogueDaemon, line: str) -> None:
    code, out, err = on_daemon.run(line, job="nobody")
    assert (code, out) == (3, "")
    assert "nobody" in err


@pytest.mark.parametrize("line", ["show latest", "show @1", "pin abc", "rm abc --yes", "estimate latest"])
def test_unknown_checkpoint_is_refused(on_daemon: CatalogueDaemon, line: str) -> None:
    code, out, err = on_daemon.run(line)
    assert (code, out) == (3, "")
    assert "job run has no checkpoint" in err
