"""`forgectl jobs watch` and the goodput of `forgectl jobs show`."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forged.cli.forgectl.commands import watch
from tests.cli.scripted_daemon import Refusal, scripted_daemon

Caught = pytest.CaptureFixture[str]

PATIENCE_S = 60
CLUSTER = {
    "job": "run", "phase": "running", "paused": False, "generation": 3, "world_size": 2, "joining": 0,
    "state": {"current_step": 118, "current_epoch": 0, "learning_rate": 0.1, "global_batch_size": 64},
    "failures": 0, "reason": "", "rescale": None, "stall_report": "",
}  # fmt: skip
SPENT = {"step_s": 90.0, "waiting_s": 4.0, "aborted_s": 0.0, "rescale_s": 5.0, "checkpoint_s": 0.5}


def worker(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "worker_id": f"w{rank}", "rank": rank, "step": 120, "age_s": 0.4, "step_time_s": 0.25, "waiting_time_s": 0.1,
        "values": {}, "logged_step": 120, "spent": SPENT, "is_slowest": False,
    } | more  # fmt: skip


METRICS = {
    "job": "run", "step": 120, "steps_per_s": 4.0, "samples_per_s": 256.0,
    "values": {"accuracy": 0.75, "loss": 0.5},
    "workers": [worker(0), worker(1, is_slowest=True, waiting_time_s=0.01, age_s=12.0)], "workers_left_out": 0,
    "goodput": {"wall_s": 100.0, "spent": SPENT, "unknown_s": 0.5, "goodput": 0.9},
    "non_finite": [],
    "history": [{"at": 1.0, "step": step, "steps_per_s": 4.0, "samples_per_s": 256.0, "values": {"loss": 3.0 - step}}
                for step in range(3)],
}  # fmt: skip
EVENT = [1, 1.0, "WorkerFailed", "run", 2, 0, "test", {"worker_id": "w2", "rank": 2, "reason": "dead"}]
GOODPUT = (
    "goodput 90.0 % of 1m40s; lost: rescales 5.0 % (5 s), waiting for slow ranks 4.0 % (4 s), "
    "saving checkpoints 0.5 % (500 ms), not known 0.5 % (500 ms)"
)


def test_watch_once_shows_figures_ranks_goodput_and_facts(tmp_path: Path, capsys: Caught) -> None:
    answers = {"ShowCluster": CLUSTER, "ReadTraining": METRICS}
    with scripted_daemon(tmp_path, answers, facts=[EVENT]) as daemon:
        code, out, err = daemon.run("jobs watch run --once", capsys)
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == "run  running, generation 3, 2 workers, step 120"
    assert lines[1] == "  4 steps/s   256 samples/s   loss 0.5   accuracy 0.75"
    assert lines[2] == "  loss █▅▁"
    assert re.split(r" {2,}", lines[5].strip()) == ["0", "w0", "120", "250 ms", "100 ms"]
    assert re.split(r" {2,}", lines[6].strip()) == ["1", "w1", "120", "250 ms", "10 ms", "slowest, no report for 12 s"]
    assert GOODPUT in lines
    assert "w2 failed (rank 2): dead" in lines[-1]


def test_watch_elsewhere_prints_a_line_an_interval_until_the_job_is_over(tmp_path: Path, capsys: Caught) -> None:
    phases = iter(["running", "running", "completed"])
    answers = {"ShowCluster": lambda _: CLUSTER | {"phase": next(phases)}, "ReadTraining": METRICS}
    with scripted_daemon(tmp_path, answers) as daemon:
        code, out, _ = daemon.run("jobs watch run --interval 0.01", capsys)
    assert code == 0
    line = (
        "run running, generation 3, 2 workers, step 120, 4 steps/s, 256 samples/s, loss 0.5, accuracy 0.75, "
        "slowest w1, goodput 90.0 %"
    )
    assert out.splitlines() == [line, line, line.replace("running", "completed")]


def test_watch_prints_json_with_values_that_are_not_finite_as_null(tmp_path: Path, capsys: Caught) -> None:
    answers = {"ShowCluster": CLUSTER, "ReadTraining": METRICS | {"values": {"loss": float("nan")}}}
    with scripted_daemon(tmp_path, answers) as daemon:
        said = json.loads(daemon.run("jobs watch run --once --json", capsys)[1])
    assert said["training"]["phase"] == "running"
    assert said["metrics"]["values"] == {"loss": None}
    assert said["metrics"]["workers"][1]["is_slowest"] is True


def test_watch_of_a_job_without_workers_says_so(tmp_path: Path, capsys: Caught) -> None:
    nothing = METRICS | {
        "step": 0, "workers": [], "goodput": None, "values": {}, "history": [], "steps_per_s": None,
        "samples_per_s": None,
    }  # fmt: skip
    answers = {"ShowCluster": Refusal("refused", "job_untrained"), "ReadTraining": nothing}
    with scripted_daemon(tmp_path, answers) as daemon:
        out = daemon.run("jobs watch run --once", capsys)[1]
    assert "no worker has joined" in out
    assert "no worker has reported yet" in out


def test_watch_of_an_unknown_job_is_refused(tmp_path: Path, capsys: Caught) -> None:
    with scripted_daemon(tmp_path, {"ReadTraining": Refusal("refused", "job_unknown", "no job")}) as daemon:
        assert daemon.run("jobs watch run", capsys)[0] == 3


def test_watch_survives_names_and_values_of_another_kind(tmp_path: Path, capsys: Caught) -> None:
    strange = METRICS | {"values": {"\x1b[2J": 1.0, "loss": "much"}, "workers": [{}, 7], "goodput": 7, "history": [3]}
    with scripted_daemon(tmp_path, {"ShowCluster": {}, "ReadTraining": strange}) as daemon:
        code, out, err = daemon.run("jobs watch run --once", capsys)
    assert (code, err) == (0, "")
    assert "\x1b[2J" not in out


def test_watch_on_a_terminal_redraws_until_the_job_is_over(tmp_path: Path) -> None:
    phases = iter(["running", "completed"])
    answers = {"ShowCluster": lambda _: CLUSTER | {"phase": next(phases)}, "ReadTraining": METRICS}
    with scripted_daemon(tmp_path, answers) as daemon:
        leader, follower = pty.openpty()
        command = daemon.command("jobs watch run --interval 0.01")
        with subprocess.Popen(command, stdout=follower, env=os.environ | {"TERM": "xterm"}) as process:
            os.close(follower)
            shown = b""
            while select.select([leader], [], [], PATIENCE_S)[0]:
                try:
                    shown += os.read(leader, 1 << 16)
                except OSError:
                    break
            assert process.wait(PATIENCE_S) == 0
        os.close(leader)
    assert shown.count((watch.HOME + watch.CLEAR).encode()) == 2
    assert b"completed" in shown


def test_show_tells_the_goodput(tmp_path: Path, capsys: Caught) -> None:
    answers = {"ShowJob": {"name": "run"}, "ShowCluster": CLUSTER, "ReadTraining": METRICS}
    with scripted_daemon(tmp_path, answers) as daemon:
        assert GOODPUT in daemon.run("jobs show run", capsys)[1]
        assert daemon.json("jobs show run", capsys)["goodput"]["goodput"] == 0.9
