"""`forgectl workers`, `plan` and `jobs` with training, and facts in words."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forged.catalog import messages as about_checkpoints
from forged.cli.forgectl import candidates, fact_sentences, main, tables
from forged.cli.forgectl.commands import jobs
from forged.client import BlockingClient
from forged.data import messages as about_data
from forged.elastic.messages import facts
from forged.elastic.model import ClusterTopology, WorkerId
from forged.kernel.messages import FACTS, Fact
from forged.memory import messages as about_memory
from forged.metrics import messages as about_metrics
from forged.registry import messages as about_models
from tests.cli.scripted_daemon import UNKNOWN, Refusal, ScriptedDaemon, scripted_daemon
from tests.client.simulated_workers import train
from tests.client.threaded_daemon import ThreadedDaemon

Caught = pytest.CaptureFixture[str]
Ctl = Callable[[str], tuple[int, str, str]]

W0 = {
    "id": "w0", "rank": 0, "status": "active", "job": "run", "generation": 3, "step": 120,
    "last_heartbeat_age_s": 0.4, "address": "node0:4000", "connected": True, "stalled": False,
}  # fmt: skip
W1 = W0 | {"id": "w1", "rank": -1, "status": "joining", "last_heartbeat_age_s": None, "address": "node1:4000"}
PAUSING = {
    "attempt": 4, "stage": "stopping", "for_s": 1.5, "waiting_for": ["w1", "w2"], "added": [], "removed": ["w3"],
    "reason": "w3 failed: dead",
}  # fmt: skip
RESCALING = {
    "job": "run", "phase": "rescaling", "paused": False, "generation": 3, "world_size": 4, "joining": 0,
    "state": {
        "current_epoch": 2, "current_step": 120, "learning_rate": 0.1, "global_batch_size": 64,
        "active_worker_count": 4, "state_timestamp": 0.0, "optimizer_state": None,
    },
    "failures": 1, "reason": "w3 failed: dead", "rescale": PAUSING,
}  # fmt: skip
RUNNING = RESCALING | {"phase": "running", "generation": 4, "world_size": 1, "rescale": None}
JOB = {"name": "run", "settings": {}, "version": 1}
UNTRAINED = Refusal("refused", "job_untrained", "no worker has joined job 'run' yet", "start some")
ABSENT = Refusal("refused", "worker_unknown", "job run has no worker 'w9'", "see `forgectl workers ls`")


@pytest.fixture
def answers() -> dict[str, Any]:
    return {
        "ListJobs": {"jobs": [JOB], "more": False},
        "ShowJob": JOB,
        "ListWorkers": {"workers": [W0, W1], "more": False},
        "ShowWorker": W0,
        "ShowCluster": RUNNING,
        "DrainWorker": {}, "EvictWorker": {}, "PauseJob": {}, "ResumeJob": {}, "AbortJob": {},
        "ReopenJob": {}, "RescaleJob": {},
    }  # fmt: skip


@pytest.fixture
def daemon(tmp_path: Path, answers: dict[str, Any]) -> Iterator[ScriptedDaemon]:
    with scripted_daemon(tmp_path, answers) as daemon:
        yield daemon


@pytest.fixture
def ctl(threaded_daemon: ThreadedDaemon, capsys: Caught) -> Ctl:
    """Runs `forgectl` on a real daemon."""

    def run(line: str) -> tuple[int, str, str]:
        code = main.main(["--socket", threaded_daemon.socket, *shlex.split(line)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


class TestList:
    @pytest.mark.parametrize(
        "line",
        [
            "workers",
            "workers ls",
            "workers list",
            "workers ls --job run --job run",
            "workers --job run",
            "workers --job run ls",
        ],
    )
    def test_workers_are_a_table(self, daemon: ScriptedDaemon, capsys: Caught, line: str) -> None:
        header, *rows = daemon.run(line, capsys)[1].splitlines()
        assert header.split() == ["job", "id", "rank", "status", "step", "gen", "heartbeat", "address"]
        assert [row.split() for row in rows] == [
            ["run", "w0", "0", "active", "120", "3", "400", "ms", "node0:4000"],
            ["run", "w1", "-", "joining", "120", "3", "-", "node1:4000"],
        ]

    @pytest.mark.parametrize("columns", [60, 80])
    def test_worker_id_is_not_cut_on_a_narrow_terminal(
        self,
        daemon: ScriptedDaemon,
        answers: dict[str, Any],
        capsys: Caught,
        monkeypatch: pytest.MonkeyPatch,
        columns: int,
    ) -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")
        long = "ip-10-0-3-117-48213-9f3a1c"
        answers["ListWorkers"] = {"workers": [W0 | {"id": long, "connected": False}], "more": False}
        _, line = daemon.run("workers", capsys)[1].splitlines()
        assert line.split()[:4] == ["run", long, "0", "active"]
        assert len(line) <= columns

    def test_json_output_is_the_reply(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        assert daemon.json("workers ls", capsys) == {"workers": [W0, W1]}

    def test_problem_column_is_shown_when_a_worker_reports_a_problem(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        assert "problem" not in daemon.run("workers", capsys)[1]
        answers["ListWorkers"] = {"workers": [W0 | {"stalled": True, "connected": False}, W1], "more": False}
        header, first, second = daemon.run("workers", capsys)[1].splitlines()
        assert header.endswith("problem")
        assert first.endswith("  stalled, no connection")
        assert second.endswith("node1:4000")

    def test_jobs_without_members_are_skipped(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ListWorkers"] = UNTRAINED
        assert daemon.run("workers", capsys) == (0, "no workers\n", "")
        assert daemon.run("workers ls --job run", capsys) == (0, "no workers\n", "")

    def test_unknown_named_job_is_refused(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers |= {"ListWorkers": UNTRAINED, "ShowJob": Refusal("refused", "job_unknown", "there is no job 'run'")}
        code, out, err = daemon.run("workers ls --job run", capsys)
        assert (code, out) == (3, "")
        assert "there is no job 'run'" in err

    def test_all_pages_of_all_jobs_are_requested(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ListJobs"] = {"jobs": [JOB, JOB | {"name": "two"}], "more": False}
        daemon.run("workers", capsys)
        assert daemon.requests[1:] == [("ListWorkers", {"job": job, "after": ""}) for job in ("run", "two")]

    def test_pages_without_progress_end_with_1(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ListWorkers"] = {"workers": [W0], "more": True}
        assert daemon.run("workers", capsys)[0] == 1

    @pytest.mark.parametrize("line", ["workers", "workers show w0", "jobs pause run", "plan --job run --workers 2"])
    def test_older_daemon_is_named_in_the_error(self, tmp_path: Path, capsys: Caught, line: str) -> None:
        with scripted_daemon(tmp_path, {"ListJobs": {"jobs": [JOB]}}, agent="forged/0.0.1") as daemon:
            code, out, err = daemon.run(line, capsys)
        assert (code, out) == (3, "")
        assert "the daemon is forged/0.0.1" in err
        assert "upgrade the daemon" in err


class TestWorker:
    def test_show_prints_a_line_per_field(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        lines = daemon.run("workers show w0", capsys)[1].splitlines()
        assert "last_heartbeat_age  400 ms" in lines
        assert daemon.requests[-1] == ("ShowWorker", {"job": "run", "worker_id": "w0"})

    def test_json_output_is_the_reply(self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught) -> None:
        answers["ShowWorker"] = W1
        assert daemon.json("workers show w1 --job run", capsys) == W1
        assert daemon.requests == [("ShowWorker", {"job": "run", "worker_id": "w1"})]

    @pytest.mark.parametrize(
        ("verb", "method", "said"),
        [
            ("drain", "DrainWorker", "draining w0 (job run) after its current step\n"),
            ("evict", "EvictWorker", "evicted w0 (job run)\n"),
        ],
    )
    def test_job_is_found_by_the_worker_id(
        self, daemon: ScriptedDaemon, capsys: Caught, verb: str, method: str, said: str
    ) -> None:
        assert daemon.run(f"workers {verb} w0", capsys) == (0, said, "")
        assert daemon.requests[-1] == (method, {"job": "run", "worker_id": "w0"})
        assert daemon.json(f"workers {verb} w0 --job run --reason 'disk is full'", capsys) == {"job": "run", "id": "w0"}
        assert daemon.requests[-1] == (method, {"job": "run", "worker_id": "w0", "reason": "disk is full"})

    @pytest.mark.parametrize("line", ["--job two drain w0", "drain w0 --job two", "--job run drain w0 --job two"])
    def test_job_option_may_precede_or_follow_the_verb(self, daemon: ScriptedDaemon, capsys: Caught, line: str) -> None:
        assert daemon.run(f"workers {line}", capsys)[0] == 0
        assert daemon.requests == [("DrainWorker", {"job": "two", "worker_id": "w0"})]

    def test_drain_prints_the_remarks(self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught) -> None:
        answers["DrainWorker"] = {"remarks": ["training will stand still"]}
        said = "draining w0 (job run) after its current step\nnote: training will stand still\n"
        assert daemon.run("workers drain w0", capsys) == (0, said, "")
        told = {"job": "run", "id": "w0", "remarks": ["training will stand still"]}
        assert daemon.json("workers drain w0", capsys) == told

    def test_worker_id_in_several_jobs_needs_the_job_option(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ListJobs"] = {"jobs": [JOB, JOB | {"name": "two"}], "more": False}
        code, out, err = daemon.run("workers evict w0", capsys)
        assert (code, out) == (3, "")
        assert "several jobs have a worker 'w0': run, two (choose one with --job)" in err
        assert "EvictWorker" not in {method for method, _ in daemon.requests}

    @pytest.mark.parametrize("answer", [ABSENT, UNTRAINED])
    def test_unknown_worker_is_refused(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, answer: Refusal
    ) -> None:
        answers["ShowWorker"] = answer
        code, _, err = daemon.run("workers drain w9", capsys)
        assert code == 3
        assert "no job has a worker 'w9'" in err

    def test_other_refusals_are_not_reported_as_unknown_worker(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ShowWorker"] = Refusal("refused", "forbidden", "not yours")
        code, _, err = daemon.run("workers show w0", capsys)
        assert code == 3
        assert "not yours" in err


class TestJobs:
    @pytest.mark.parametrize(
        ("verb", "method"),
        [
            ("pause", "PauseJob"),
            ("resume", "ResumeJob"),
            ("abort", "AbortJob"),
            ("reopen", "ReopenJob"),
            ("rescale", "RescaleJob"),
        ],
    )
    def test_control_commands_send_an_optional_reason(
        self, daemon: ScriptedDaemon, capsys: Caught, verb: str, method: str
    ) -> None:
        code, out, err = daemon.run(f"jobs {verb} run", capsys)
        assert (code, err, out[:5]) == (0, "", "run: ")
        assert daemon.json(f"jobs {verb} run --reason 'a b'", capsys) == {}
        assert daemon.requests == [(method, {"job": "run"}), (method, {"job": "run", "reason": "a b"})]

    @pytest.mark.parametrize(
        ("verb", "reply", "said"),
        [
            ("pause", {}, "training pauses after the current step"),
            ("pause", {"changed": False, "reason": "night"}, "training was already paused: night"),
            ("resume", {"changed": True}, "training resumes"),
            (
                "resume",
                {"changed": True, "stall_report": "1 worker waits"},
                "training is no longer paused; 1 worker waits",
            ),
            ("resume", {"changed": False, "stall_report": ""}, "training was not paused"),
            ("resume", {"changed": False, "stall_report": "1 worker waits"}, "training was not paused; 1 worker waits"),
            ("abort", {}, "training is aborted and its workers end; `forgectl jobs reopen` lets new ones continue"),
            ("reopen", {}, "the job accepts workers again"),
            ("reopen", {"stall_report": "2 must join"}, "the job accepts workers again; 2 must join"),
            ("abort", {"changed": False, "reason": "enough"}, "training was already aborted: enough"),
            ("rescale", {}, "a rescale starts; follow it with `forgectl jobs watch --rescale`"),
            ("rescale", {"changed": False, "stall_report": "1 worker waits"}, "no rescale starts now; 1 worker waits"),
        ],
    )
    def test_control_commands_print_their_effect(
        self,
        daemon: ScriptedDaemon,
        answers: dict[str, Any],
        capsys: Caught,
        verb: str,
        reply: dict[str, Any],
        said: str,
    ) -> None:
        answers |= dict.fromkeys(("PauseJob", "ResumeJob", "AbortJob", "ReopenJob", "RescaleJob"), reply)
        assert daemon.run(f"jobs {verb} run", capsys) == (0, f"run: {said}\n", "")
        assert daemon.json(f"jobs {verb} run", capsys) == reply

    def test_show_prints_phase_and_progress(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        job, training = daemon.run("jobs show run", capsys)[1].split("\n\n")
        assert job.splitlines()[0].split() == ["name", "run"]
        lines = dict(line.split(maxsplit=1) for line in training.splitlines())
        assert (lines["phase"], lines["world_size"], lines["step"], lines["epoch"]) == ("running", "1", "120", "2")
        assert (lines["learning_rate"], lines["updated"]) == ("0.1", "-")

    def test_show_prints_stage_and_missing_workers_of_a_rescale(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ShowCluster"] = RESCALING
        _, _, rescale = daemon.run("jobs show run", capsys)[1].split("\n\n")
        assert rescale.splitlines()[:5] == [
            "rescale in progress:",
            "attempt      4",
            "stage        stopping",
            "for          1.5 s",
            "waiting_for  w1, w2",
        ]

    @pytest.mark.parametrize("cluster", [RUNNING, RESCALING])
    def test_show_prints_the_stall_report_first(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, cluster: dict[str, Any]
    ) -> None:
        answers["ShowCluster"] = cluster | {"stall_report": "1 worker waits: max_workers is 1"}
        lines = daemon.run("jobs show run", capsys)[1].split("\n\n")[1].splitlines()
        assert lines[1] == "stall_report       1 worker waits: max_workers is 1"
        answers["ShowCluster"] = cluster | {"stall_report": ""}
        lines = daemon.run("jobs show run", capsys)[1].split("\n\n")[1].splitlines()
        assert lines[1] == "stall_report       -"

    def test_fence_is_only_in_json_output(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ShowJob"] = answers["CreateJob"] = answers["ChangeJob"] = JOB | {"fence": [1, 0]}
        for line in ("jobs show run", "jobs create run", "jobs change run a=1"):
            assert "fence" not in daemon.run(line, capsys)[1]
        assert daemon.json("jobs show run", capsys)["fence"] == [1, 0]

    def test_list_shows_phases_of_jobs_with_members(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ListJobs"] = {"jobs": [JOB, JOB | {"name": "two"}], "more": False}
        answers["ListClusters"] = {"clusters": [RUNNING], "more": False}
        header, *rows = daemon.run("jobs ls", capsys)[1].splitlines()
        assert header.split()[:3] == ["name", "phase", "version"]
        assert [row.split()[:3] for row in rows] == [["run", "running", "1"], ["two", "-", "1"]]
        assert daemon.json("jobs ls", capsys) == {"jobs": [JOB | {"phase": "running"}, JOB | {"name": "two"}]}

    @pytest.mark.parametrize(("phase", "said"), [("running", "paused"), ("completed", "completed")])
    def test_list_shows_paused_jobs(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, phase: str, said: str
    ) -> None:
        answers["ListClusters"] = {"clusters": [RUNNING | {"phase": phase, "paused": True}], "more": False}
        assert said in daemon.run("jobs ls", capsys)[1].splitlines()[1].split()
        assert daemon.json("jobs ls", capsys) == {"jobs": [JOB | {"phase": phase, "paused": True}]}

    def test_jobs_of_a_daemon_without_phases_are_listed(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        assert daemon.json("jobs ls", capsys) == {"jobs": [JOB]}

    @pytest.mark.parametrize(("line", "more"), [("jobs rm run", {}), ("jobs rm run --force", {"force": True})])
    def test_rm_sends_force_only_with_the_option(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, line: str, more: dict[str, Any]
    ) -> None:
        answers["RemoveJob"] = {}
        assert daemon.run(line, capsys)[:2] == (0, "removed job run\n")
        assert daemon.requests[-1] == ("RemoveJob", {"job": "run"} | more)

    def test_rm_tells_where_the_checkpoints_of_the_job_stay(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        paths = ["/data/run/step-200", "/data/run/step-100", "/data/old/step-50", ""]
        records = [{"checkpoint_id": f"c{number}", "storage_path": path} for number, path in enumerate(paths)]
        answers |= {"RemoveJob": {}, "ListCheckpoints": {"checkpoints": records, "more": False}}
        stay = "the files of its checkpoints stay in {0}; `forgectl ckpt adopt {0} --job JOB` adds them to a job\n"
        said = "removed job run\n" + stay.format("/data/old") + stay.format("/data/run")
        assert daemon.run("jobs rm run", capsys) == (0, said, "")
        assert daemon.json("jobs rm run", capsys) == {}

    def test_json_of_a_job_contains_its_training(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        assert daemon.json("jobs show run", capsys) == JOB | {"training": RUNNING}

    @pytest.mark.parametrize("answer", [UNTRAINED, UNKNOWN])
    def test_job_without_training_is_shown(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, answer: Refusal
    ) -> None:
        answers["ShowCluster"] = answer
        assert daemon.json("jobs show run", capsys) == JOB
        assert "phase" not in daemon.run("jobs show run", capsys)[1]

    @pytest.mark.parametrize(
        "cluster",
        [{"rescale": 7, "state": None}, RUNNING | {"state": 7}, {"rescale": {"waiting_for": 7}}, {"later": 1}],
    )
    def test_training_with_missing_fields_is_shown(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, cluster: dict[str, Any]
    ) -> None:
        answers["ShowCluster"] = cluster
        assert daemon.run("jobs show run", capsys)[0] == 0


class ScriptedReplies(dict[str, Any]):
    """Replies; those to `ShowCluster` are returned one after the other."""

    def get(self, key: str, default: Any = None) -> Any:
        answer = super().get(key, default)
        return answer.pop(0) if key == "ShowCluster" else answer


class TestWatch:
    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jobs, "WATCH_INTERVAL_S", 0)

    WATCH_REPLIES = (
        RESCALING,
        RESCALING | {"rescale": PAUSING | {"for_s": 1.7}},
        RESCALING | {"rescale": PAUSING | {"waiting_for": ["w2"]}},
        RESCALING | {"rescale": PAUSING | {"stage": "synchronising", "waiting_for": []}},
        RESCALING | {"rescale": None},
        RUNNING,
    )

    def test_watch_prints_a_line_per_stage(self, tmp_path: Path, capsys: Caught) -> None:
        with scripted_daemon(tmp_path, ScriptedReplies(ShowCluster=list(self.WATCH_REPLIES))) as daemon:
            code, out, err = daemon.run("jobs watch run --rescale", capsys)
        assert (code, err) == (0, "")
        assert out.splitlines() == [
            "attempt 4: stopping, waiting for w1, w2 (w3 failed: dead)",
            "attempt 4: stopping, waiting for w2 (w3 failed: dead)",
            "attempt 4: synchronising (w3 failed: dead)",
            "rescaling: between two attempts",
            "running: generation 4, 1 worker, step 120 (w3 failed: dead)",
        ]

    def test_watch_prints_a_json_line_per_change(self, tmp_path: Path, capsys: Caught) -> None:
        with scripted_daemon(tmp_path, ScriptedReplies(ShowCluster=list(self.WATCH_REPLIES))) as daemon:
            told = [json.loads(line) for line in daemon.run("jobs watch run --rescale --json", capsys)[1].splitlines()]
        assert told == [self.WATCH_REPLIES[number] for number in (0, 2, 3, 4, 5)]

    def test_watch_without_a_rescale_prints_the_phase_and_ends(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        assert daemon.run("jobs watch run --rescale", capsys)[1].startswith("running: generation 4")
        assert len(daemon.requests) == 1

    def test_watch_prints_the_stall_report_after_the_phase(self, tmp_path: Path, capsys: Caught) -> None:
        life = [
            RESCALING | {"stall_report": "attempt 4 waits for w1, w2 to stop (1 s)"},
            RESCALING | {"rescale": None, "stall_report": "attempt 5 starts when w1 is back"},
            RESCALING | {"rescale": None, "stall_report": "attempt 5 starts when w1 is back, in 2 s at the latest"},
            RUNNING | {"stall_report": "paused: night"},
        ]
        with scripted_daemon(tmp_path, ScriptedReplies(ShowCluster=life)) as daemon:
            assert daemon.run("jobs watch run --rescale", capsys)[1].splitlines() == [
                "attempt 4: stopping, waiting for w1, w2 (w3 failed: dead)",
                "rescaling: between two attempts; attempt 5 starts when w1 is back",
                "running: generation 4, 1 worker, step 120; paused: night",
            ]

    def test_watch_counts_many_missing_workers(self, tmp_path: Path, capsys: Caught) -> None:
        many = RESCALING | {"rescale": PAUSING | {"waiting_for": [f"w{number}" for number in range(1000)]}}
        with scripted_daemon(tmp_path, ScriptedReplies(ShowCluster=[many, RUNNING])) as daemon:
            first = daemon.run("jobs watch run --rescale", capsys)[1].splitlines()[0]
        assert first.startswith("attempt 4: stopping, waiting for w0, w1, w2, w3, w4, w5, w6, w7 and 992 more (")


class TestPlan:
    PLAN = {  # noqa: RUF012
        "world_size": 2, "new_world_size": 3, "learning_rate": 0.1, "new_learning_rate": 0.15, "ranks_changed": 1,
        "global_batch_size": 64, "new_global_batch_size": 64, "remarks": ["so many are not taken in"],
        "workers": [
            {"id": "w0", "rank": 0, "new_rank": 0},
            {"id": "w1", "rank": 2, "new_rank": 1},
            {"id": "new-1", "rank": -1, "new_rank": 2},
        ],
    }  # fmt: skip

    def test_plan_prints_the_changes(self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught) -> None:
        answers["PlanRescale"] = self.PLAN
        assert daemon.run("plan --job run --workers 3", capsys)[1].splitlines() == [
            "workers            2 -> 3",
            "learning_rate      0.1 -> 0.15",
            "global_batch_size  64",
            "ranks_changed      1",
            "note: so many are not taken in",
            "",
            "worker  rank  new_rank",
            "w1         2         1",
            "new-1      -         2",
        ]
        assert daemon.requests[0] == ("PlanRescale", {"job": "run", "workers": 3})

    def test_unknown_values_are_shown_as_dashes(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        unknown = {"learning_rate": 0.0, "new_learning_rate": 0.0, "global_batch_size": 0, "new_global_batch_size": 32}
        answers["PlanRescale"] = self.PLAN | unknown
        lines = daemon.run("plan --job run --workers 3", capsys)[1].splitlines()
        assert lines[1:3] == ["learning_rate      -", "global_batch_size  - -> 32"]

    def test_json_output_is_the_reply(self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught) -> None:
        answers["PlanRescale"] = self.PLAN
        assert daemon.json("plan --job run --workers 3", capsys) == self.PLAN

    def test_many_future_workers_are_one_line(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        gap = [{"id": "new-1", "rank": -1, "new_rank": 1}]
        many = [{"id": f"new-{number}", "rank": -1, "new_rank": number + 2} for number in range(2, 9_998)]
        answers["PlanRescale"] = self.PLAN | {"workers": gap + many}
        *_, header, only, line = daemon.run("plan --job run --workers 3", capsys)[1].splitlines()
        assert (header.split(), only.split()) == (["worker", "rank", "new_rank"], ["new-1", "-", "1"])
        assert line == "new-2 … new-9997 get ranks 4 … 9999"
        assert len(daemon.json("plan --job run --workers 3", capsys)["workers"]) == 9_997
        answers["PlanRescale"] = self.PLAN | {"workers": many}
        assert daemon.run("plan --job run --workers 3", capsys)[1].splitlines()[-2:] == ["", line]

    @pytest.mark.parametrize("plan", [{}, {"workers": 7, "remarks": None}, {"workers": [7], "remarks": [{}]}])
    def test_plan_with_missing_fields_is_shown(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, plan: dict[str, Any]
    ) -> None:
        answers["PlanRescale"] = plan
        code, out, _ = daemon.run("plan --job run --workers 3", capsys)
        assert (code, out.splitlines()[-1]) == (0, "no rank changes")

    @pytest.mark.parametrize("size", ["0", "-1", "some", "1.5", "1_0", "", "9" * 30])
    def test_invalid_number_of_workers_is_wrong_usage(self, size: str, capsys: Caught) -> None:
        with pytest.raises(SystemExit) as left:
            main.main(["plan", "--job", "run", f"--workers={size}"])
        assert left.value.code == 2
        assert "the number of workers must be an integer >= 1" in capsys.readouterr().err


ABOUT_MODEL = {"model_id": "vision/net", "by": "ann"}
VERSION = {"model_id": "vision/net", "version": [1, 2, 0]}
MODEL = ABOUT_MODEL | VERSION
WITH_SENTENCES = tuple(
    module.__name__ for module in (facts, about_data, about_checkpoints, about_models, about_memory, about_metrics)
)


def as_sent(value: Any) -> Any:
    """The value after encoding and decoding."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


OLD = ClusterTopology(tuple(WorkerId(f"w{number}", "node", number) for number in range(4)), 1)
NEW = ClusterTopology((*OLD.workers[:1], WorkerId("w9", "node", 9), *OLD.workers[2:]), 2)
STARTED = {
    "attempt": 2, "type": "scale_down", "world_size": 1, "added": [], "removed": ["w1"], "reason": "w1 failed: dead",
}  # fmt: skip
COMPLETED = {
    "attempt": 2, "type": "replace", "delta": as_sent(OLD.delta_to(NEW)), "step": 5, "epoch": 0,
    "learning_rate": 0.1, "global_batch_size": 64, "added": ["w9"], "removed": ["w1"], "reason": "w1 failed: dead",
    "took_s": 0.012,
}  # fmt: skip


ABOUT = {"checkpoint_id": "c-7", "step": 1200}
SAVED = ABOUT | {"size_bytes": 2_150_000_000}
SAVING = ABOUT | {"epoch": 0, "checkpoint_type": "incremental", "storage_path": "s3://b/r/step-1200"}


class TestFactSentences:
    @pytest.mark.parametrize(
        ("kind", "fact", "said"),
        [
            (
                "WorkerJoined",
                {"worker": {"id": "w0", "hostname": "::1", "port": 4}},
                "w0@::1:4 joined and waits for a rank",
            ),
            ("WorkerReturned", {"worker_id": "w0", "after_s": 1.2}, "w0 reconnected after 1.2 s"),
            ("WorkerReturned", {"worker_id": "w0", "after_s": 0.0}, "w0 reconnected"),
            ("WorkerLeft", {"worker_id": "w0", "reason": "done"}, "w0 left: done"),
            ("WorkerFailed", {"worker_id": "w0", "rank": 0, "reason": "dead"}, "w0 failed (rank 0): dead"),
            ("WorkerFailed", {"worker_id": "w0", "rank": -1, "reason": "dead"}, "w0 failed: dead"),
            ("RescaleStarted", STARTED, "attempt 2 to rescale to 1 worker (scale down), removing w1: w1 failed: dead"),
            (
                "RescaleStarted",
                STARTED | {"in_background": True},
                "attempt 2 to rescale to 1 worker (scale down) in the background, removing w1: w1 failed: dead",
            ),
            (
                "RescaleStarted",
                STARTED | {"in_background": False},
                "attempt 2 to rescale to 1 worker (scale down), removing w1: w1 failed: dead",
            ),
            (
                "RescaleStarted",
                STARTED | {"world_size": 2, "removed": [f"w{number}" for number in range(10)]},
                "attempt 2 to rescale to 2 workers (scale down), "
                "removing w0, w1, w2, w3, w4, w5, w6, w7 and 2 more: w1 failed: dead",
            ),
            (
                "RescaleStarted",
                STARTED | {"removed": ["w1", "w2"], "draining": ["w2"]},
                "attempt 2 to rescale to 1 worker (scale down), removing w1, draining w2: w1 failed: dead",
            ),
            (
                "RescaleStarted",
                STARTED | {"draining": ["w1"], "reason": "draining w1: enough"},
                "attempt 2 to rescale to 1 worker (scale down), draining w1: draining w1: enough",
            ),
            (
                "RescaleStarted",
                STARTED | {"type": "replace", "added": ["w9"]},
                "attempt 2 to rescale to 1 worker (replace), adding w9, removing w1: w1 failed: dead",
            ),
            (
                "RescaleStarted",
                STARTED | {"type": "replace", "removed": [], "reason": "requested by an operator"},
                "attempt 2 to rescale to 1 worker: requested by an operator",
            ),
            (
                "ProgressLost",
                {"steps": 1200, "step": 0, "reason": "no remaining worker holds them"},
                "the steps committed after step 0 are lost (1,200 steps): no remaining worker holds them",
            ),
            (
                "RescaleSynchronising",
                {"attempt": 2, "source": {"id": "w0", "hostname": "h", "port": 4}, "step": 7, "behind": 0},
                "attempt 2: all workers have stopped after step 7",
            ),
            (
                "RescaleSynchronising",
                {"attempt": 2, "source": {"id": "w0", "hostname": "h", "port": 4}, "step": 0, "behind": 2},
                "attempt 2: all workers have stopped after step 0; w0@h:4 sends its state to 2 workers",
            ),
            (
                "RescaleCompleted",
                COMPLETED,
                "attempt 2 committed after 12 ms: 4 workers (added w9) (removed w1), training resumes after step 5 "
                "of epoch 0, learning rate 0.1, batch 64: w1 failed: dead",
            ),
            (
                "RescaleCompleted",
                COMPLETED | {"delta": {"pieces": 7}, "learning_rate": 0.0, "global_batch_size": 0, "added": []},
                "attempt 2 committed after 12 ms (removed w1), training resumes after step 5 of epoch 0: "
                "w1 failed: dead",
            ),
            (
                "RescaleCompleted",
                COMPLETED | {"step": None, "epoch": None},
                "attempt 2 committed after 12 ms: 4 workers (added w9) (removed w1), learning rate 0.1, "
                "batch 64: w1 failed: dead",
            ),
            (
                "WorkerLost",
                {"worker_id": "w0", "reason": "connection lost", "grace_s": 15.0},
                "w0 is lost: connection lost; it has 15 s to reconnect",
            ),
            (
                "WorkerLost",
                {"worker_id": "w0", "reason": "its pulse lives", "grace_s": None},
                "w0 is lost: its pulse lives",
            ),
            (
                "NonFiniteLoss",
                {"worker_id": "w0", "rank": 3, "step": 7, "name": "loss", "value": "nan"},
                "w0 logged loss = nan (rank 3) at step 7",
            ),
            (
                "WorkerStoodStill",
                {"worker_id": "w0", "lost_generation": 4, "peer": "w1", "for_s": 72.3},
                "w0 stood still without a daemon for 1m12s, after losing w1 in generation 4",
            ),
            (
                "WorkerStoodStill",
                {"worker_id": "w0", "lost_generation": 4, "peer": "", "for_s": 3.2},
                "w0 stood still without a daemon for 3.2 s in generation 4",
            ),
            ("JobWaiting", {"workers": 1, "needed": 2}, "training waits: 1 worker available, 2 required"),
            ("JobAborted", {"reason": "enough", "step": 0}, "training is aborted after step 0: enough"),
            ("JobReopened", {"reason": "spare hosts", "step": 7}, "the job is reopened after step 7: spare hosts"),
            (
                "CheckpointStarted",
                SAVING | {"parent_id": None, "worker_id": "", "reason": ""},
                "saving checkpoint c-7 (incremental) of step 1200, epoch 0, at s3://b/r/step-1200",
            ),
            (
                "CheckpointStarted",
                SAVING | {"parent_id": "c-6", "worker_id": "w0", "reason": "every 600 s"},
                "saving checkpoint c-7 (incremental) of step 1200, epoch 0, at s3://b/r/step-1200, building on c-6, "
                "by w0: every 600 s",
            ),
            (
                "CheckpointCompleted",
                SAVED | {"seconds": 2.5, "parent_id": None},
                "checkpoint c-7 is complete (step 1200): 2.15 GB saved in 2.5 s",
            ),
            (
                "CheckpointCompleted",
                SAVED | {"seconds": 2.5, "parent_id": "c-6"},
                "checkpoint c-7 is complete (step 1200): 2.15 GB saved in 2.5 s, building on c-6",
            ),
            ("CheckpointFailed", ABOUT | {"reason": "no space"}, "checkpoint c-7 was not saved (step 1200): no space"),
            ("CheckpointCorrupted", ABOUT | {"reason": "bad"}, "checkpoint c-7 is corrupted (step 1200): bad"),
            ("CheckpointRepaired", ABOUT, "all bytes of checkpoint c-7 are correct again (step 1200)"),
            (
                "CheckpointCollected",
                SAVED | {"rule": "surplus", "reason": "3 newer ones are restorable"},
                "deleting checkpoint c-7 (step 1200), 2.15 GB, by the rule surplus: 3 newer ones are restorable",
            ),
            ("CheckpointCompacted", SAVED, "checkpoint c-7 builds on no other one any more (step 1200), 2.15 GB"),
            ("CheckpointParentFound", ABOUT | {"parent_id": "c-6"}, "checkpoint c-7 builds on c-6 (step 1200)"),
            (
                "CheckpointOperationFailed",
                ABOUT | {"operation": "compacting", "reason": "no space"},
                "compacting checkpoint c-7 failed (step 1200): no space",
            ),
            (
                "CheckpointsAbandoned",
                {"step": 900, "count": 3, "checkpoint_id": "c-4"},
                "training continues after step 900, from checkpoint c-4; abandons 3 checkpoints beyond it",
            ),
            (
                "CheckpointsAbandoned",
                {"step": 0, "count": 1, "checkpoint_id": ""},
                "training continues after step 0; abandons 1 checkpoint beyond it",
            ),
            (
                "CheckpointReinstated",
                ABOUT | {"reason": "the evaluation was wrong"},
                "checkpoint c-7 is no longer abandoned (step 1200): the evaluation was wrong",
            ),
            (
                "CheckpointRestored",
                SAVED | {"seconds": 2.5, "skipped": []},
                "the job is restored from checkpoint c-7 (step 1200): 2.15 GB read in 2.5 s",
            ),
            (
                "CheckpointRestored",
                SAVED | {"seconds": 0.0, "size_bytes": 0, "skipped": ["c-9: a chunk is corrupt"]},
                "the job is restored from checkpoint c-7 (step 1200); skipped c-9: a chunk is corrupt",
            ),
            ("CheckpointsAdopted", {"count": 1200, "folder": "/data/r"}, "1,200 checkpoints adopted from /data/r"),
            (
                "EmergencyCheckpointSaved",
                SAVED | {"worker_id": "w0", "seconds": 0.4},
                "checkpoint c-7 was saved from memory (step 1200) 400 ms after w0 failed, 2.15 GB",
            ),
            (
                "EmergencyCheckpointFailed",
                {"step": 1200, "worker_id": "w0", "reason": "no space"},
                "the emergency checkpoint after the failure of w0 was not saved (step 1200): no space",
            ),
            (
                "DeviceRegistered",
                {"device": "w0/gpu0", "total_memory": 80 << 30},
                "device w0/gpu0 is registered, 80.0 GiB",
            ),
            (
                "OutOfMemory",
                {
                    "device": "w0/gpu0",
                    "worker_id": "w1",
                    "tensor_id": "kv",
                    "size": 3 << 20,
                    "total_free": 1 << 20,
                    "largest_hole": 1 << 10,
                    "evictable_bytes": 0,
                    "blocking": ["w0:a"],
                    "fix": "free w0:a",
                },
                "w1 gets no 3.00 MiB on w0/gpu0 for kv: 1.00 MiB free, 1.00 KiB of it together; in the way: w0:a; "
                "free w0:a",
            ),
            (
                "BlockEvicted",
                {
                    "device": "w0/gpu0",
                    "blocks": ["w0:a"],
                    "count": 1,
                    "bytes": 1536,
                    "tensor_id": "kv",
                    "worker_id": "w1",
                },
                "1 block on w0/gpu0 gave way (1.50 KiB) to w1 for kv: w0:a",
            ),
            (
                "ModelRegistered",
                MODEL | {"state": "staging", "checksum": "sha256:0", "is_import": True, "checkpoint_id": ""},
                "vision/net@1.2.0 is registered as staging by ann (imported), checksum sha256:0",
            ),
            (
                "ModelRegistered",
                MODEL | {"state": "registered", "checksum": "sha256:0", "is_import": False, "checkpoint_id": "ckpt-1"},
                "vision/net@1.2.0 is registered by ann, checksum sha256:0, from checkpoint ckpt-1",
            ),
            (
                "ModelPolicyChanged",
                ABOUT_MODEL | {"policy": {"canary": "act", "min_accuracy": None}, "reason": ""},
                "model vision/net has another policy (canary=act min_accuracy=-), by ann",
            ),
            (
                "CanaryMeasured",
                VERSION | {"reason": "it is slow", "action": "act", "priority": 2.0, "threshold": 1.0, "entry": 3},
                "canary vision/net@1.2.0 was measured: it is slow (policy: act)",
            ),
            (
                "ModelTransitioned",
                MODEL | {"was": "validating", "now": "staging", "reason": "", "waiver": "no lab"},
                "vision/net@1.2.0 became staging (was validating), by ann; without evidence: no lab",
            ),
            (
                "ValidationRecorded",
                MODEL | {"number": 3, "passed": False, "latency_p99_ms": 12.512345, "accuracy_score": float("nan")},
                "validation 3 of vision/net@1.2.0 has failed, p99 latency 12.51 ms, by ann",
            ),
            (
                "AliasMoved",
                ABOUT_MODEL | {"alias": "serving", "was": [1, 1, 0], "now": [1, 2, 0], "reason": "better"},
                "alias serving of vision/net moved from 1.1.0 to 1.2.0, by ann: better",
            ),
            (
                "AliasMoved",
                ABOUT_MODEL | {"alias": "old", "was": [1, 1, 0], "now": None, "reason": ""},
                "alias old of vision/net moved from 1.1.0, by ann",
            ),
            (
                "RollbackAdvised",
                VERSION | {"priority": 1.5, "threshold": 1.0, "reason": "it is slow"},
                "canary vision/net@1.2.0 should be rolled back: it is slow",
            ),
            (
                "ModelRolledBack",
                MODEL | {"to": [1, 1, 0], "reason": "it is slow"},
                "vision/net@1.2.0 is rolled back, 1.1.0 serves, by ann: it is slow",
            ),
            (
                "ModelTagged",
                MODEL | {"set": {"a": "b"}, "removed": ["c"]},
                "vision/net@1.2.0 is tagged with {a=b}, without c, by ann",
            ),
        ],
    )
    def test_training_facts_have_sentences(self, kind: str, fact: dict[str, Any], said: str) -> None:
        assert fact_sentences.in_words(kind, fact) == said

    def test_exactly_the_facts_about_training_checkpoints_models_and_memory_have_sentences(self) -> None:
        assert fact_sentences._CLAUSES.keys() == {
            name for name, kind in FACTS.items() if kind.__module__ in WITH_SENTENCES and kind is not Fact
        }

    @pytest.mark.parametrize("kind", fact_sentences._CLAUSES)
    def test_every_field_of_a_fact_is_in_its_sentence(self, kind: str) -> None:
        named = set().union(*map(fact_sentences.fields_of, fact_sentences._CLAUSES[kind]))
        assert set(FACTS[kind].__struct_fields__) - named <= fact_sentences._FOLLOWS

    def test_unknown_fields_are_appended_to_the_sentence(self) -> None:
        said = fact_sentences.in_words("WorkerLeft", {"worker_id": "w0", "reason": "done", "mood": "good", "for_s": 60})
        assert said == "w0 left: done mood=good for_s=1m00s"

    @pytest.mark.parametrize("kind", [*fact_sentences._CLAUSES, "NoteAdded", None, 7, []])
    @pytest.mark.parametrize("fact", [{}, {"mood": "good"}])
    def test_a_fact_without_its_main_field_has_no_sentence(self, kind: Any, fact: dict[str, Any]) -> None:
        said = fact_sentences.in_words(kind, fact)
        assert said is None or kind in ("JobPaused", "JobResumed", "JobCompleted", "JobAborted", "JobReopened")

    @pytest.mark.parametrize("kind", fact_sentences._CLAUSES)
    @pytest.mark.parametrize("value", [None, 7, -1, 0.5, True, "", "x", b"x", [], [[1], {}], {"pieces": [[1, 2], [3]]}])
    def test_a_field_may_be_anything(self, kind: str, value: Any) -> None:
        fact = dict.fromkeys(FACTS[kind].__struct_fields__, value)
        assert isinstance(fact_sentences.in_words(kind, fact), str | None)

    def test_control_characters_are_escaped(self) -> None:
        said = fact_sentences.in_words("WorkerLeft", {"worker_id": "w0", "reason": "\x1b[2J\n{worker_id}"})
        assert said == r"w0 left: \x1b[2J\n{worker_id}"

    def test_sentences_are_shown_in_events_and_stories(self, capsys: Caught) -> None:
        record = {"id": 7, "at": 0.0, "type": "JobCompleted", "job": "a", "origin": "x", "fact": {"step": 9}}
        tables.event(record, fact_sentences.in_words)
        tables.story([record], 7, fact_sentences.in_words)
        first, second = capsys.readouterr().out.splitlines()
        assert first.endswith("JobCompleted          training is complete after step 9  (x)")
        assert second.endswith(first.partition("7")[2])

    def test_worker_addresses_are_shown_in_one_notation(self) -> None:
        worker = {"id": "w0", "hostname": "h\n", "port": 4}
        assert tables.field("workers", [worker, worker | {"more": 1}]) == (
            r"w0@h\n:4, {id=w0 hostname=h\n port=4 more=1}"
        )
        assert tables.field("worker", worker | {"port": {}}) == r"{id=w0 hostname=h\n port=-}"


class TestColours:
    @pytest.mark.parametrize(
        ("key", "value", "colour"),
        [
            ("status", "active", "32"),
            ("status", "joining", "33"),
            ("status", "rescaling", "33"),
            ("status", "failed", "31"),
            ("phase", "running", "32"),
            ("phase", "waiting", "31"),
            ("phase", "aborted", "31"),
        ],
    )
    def test_problems_are_coloured(
        self, capsys: Caught, monkeypatch: pytest.MonkeyPatch, key: str, value: str, colour: str
    ) -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        tables.pairs({key: value})
        assert f"\x1b[{colour}m{value}\x1b[0m" in capsys.readouterr().out


class TestCompletion:
    def offered(self, daemon: ScriptedDaemon, *typed: str) -> list[tuple[str, str]]:
        return candidates.candidates(main._parser(), ["--socket", str(daemon.path), *typed])

    def test_workers_of_all_jobs_are_completed(self, daemon: ScriptedDaemon) -> None:
        assert self.offered(daemon, "workers", "show", "") == [("w0", "run, active"), ("w1", "run, joining")]

    def test_workers_of_the_named_job_are_completed(self, daemon: ScriptedDaemon) -> None:
        assert [name for name, _ in self.offered(daemon, "workers", "drain", "--job", "run", "w1")] == ["w1"]
        assert daemon.requests == [("ListWorkers", {"job": "run", "after": "w"})]

    def test_job_option_before_the_verb_limits_completion(self, daemon: ScriptedDaemon) -> None:
        assert [name for name, _ in self.offered(daemon, "workers", "--job", "run", "drain", "w1")] == ["w1"]
        assert daemon.requests == [("ListWorkers", {"job": "run", "after": "w"})]

    def test_completion_without_workers_is_empty(self, daemon: ScriptedDaemon, answers: dict[str, Any]) -> None:
        answers["ListWorkers"] = UNKNOWN
        assert self.offered(daemon, "workers", "evict", "") == []

    @pytest.mark.parametrize("typed", [["jobs", "pause", ""], ["jobs", "watch", "r"], ["plan", "--job", ""]])
    def test_job_names_are_completed(self, daemon: ScriptedDaemon, typed: list[str]) -> None:
        assert self.offered(daemon, *typed) == [("run", "")]


class TestRealDaemon:
    """With simulated workers."""

    @pytest.fixture(autouse=True)
    def _training(self, client: BlockingClient) -> None:
        client.create_job("idle")
        train(client, "run", "w0", "w1")

    def test_workers_have_the_documented_fields(self, ctl: Ctl) -> None:
        workers = json.loads(ctl("workers ls --json")[1])["workers"]
        fields = ("id", "rank", "status", "job", "generation", "step")
        assert [[one[field] for field in fields] for one in workers] == [
            ["w0", 0, "active", "run", 1, 0],
            ["w1", 1, "active", "run", 1, 0],
        ]
        assert all("last_heartbeat_age_s" in one for one in workers)

    def test_drain_and_evict_remove_the_workers(self, ctl: Ctl) -> None:
        assert ctl("workers drain w0 --reason upgrade")[0] == 0
        assert "leaving" in ctl("workers show w0")[1]
        assert ctl("workers evict w1")[0] == 0
        assert ctl("workers show w1 --job run")[0] == 3
        events = ctl("events")[1]
        assert "draining w0 after its current step: upgrade" in events
        assert "w1 failed (rank 1): evicted: requested by an operator" in events

    def test_requested_rescale_is_shown(self, ctl: Ctl) -> None:
        assert ctl("jobs rescale run --reason 'a test'")[0] == 0
        training = json.loads(ctl("jobs show run --json")[1])["training"]
        assert (training["phase"], training["rescale"]["waiting_for"]) == ("rescaling", ["w0", "w1"])
        assert "waiting_for  w0, w1" in ctl("jobs show run")[1]
        assert "attempt 2 to rescale to 2 workers: a test" in ctl("events")[1]
        assert ctl("jobs abort run")[0] == 0
        assert ctl("jobs watch run --rescale")[1].startswith("aborted: generation 1")

    def test_aborted_job_is_reopened_and_no_other(self, ctl: Ctl) -> None:
        code, _, err = ctl("jobs reopen run")
        assert (code, "phase of job run must be aborted, got running" in err) == (3, True)
        ctl("jobs abort run")
        assert ctl("jobs reopen run --reason 'spare hosts'")[1].startswith("run: the job accepts workers again; ")
        assert json.loads(ctl("jobs show run --json")[1])["training"]["phase"] == "forming"
        assert "the job is reopened after step 0: spare hosts" in ctl("events")[1]

    def test_training_pauses_and_resumes(self, ctl: Ctl) -> None:
        assert ctl("jobs pause run")[0] == 0
        assert json.loads(ctl("jobs show run --json")[1])["training"]["paused"]
        assert ctl("jobs resume run")[0] == 0
        assert not json.loads(ctl("jobs show run --json")[1])["training"]["paused"]

    def test_plan_names_removed_workers(self, ctl: Ctl) -> None:
        assert re.search(r"^w1 +1 +-$", ctl("plan --job run --workers 1")[1], re.MULTILINE)

    def test_job_list_shows_the_phase_of_each_job(self, ctl: Ctl) -> None:
        jobs = json.loads(ctl("jobs ls --json")[1])["jobs"]
        assert [(job["name"], job.get("phase")) for job in jobs] == [("idle", None), ("run", "running")]

    def test_stall_report_is_shown_with_its_reason(self, ctl: Ctl) -> None:
        ctl("jobs pause run --reason night")
        paused = "paused: night (until `forgectl jobs resume run`)"
        shown = ctl("jobs show run")[1]
        assert re.search(f"^stall_report +{re.escape(paused)}$", shown, re.MULTILINE)
        assert "\nreason" not in shown, "that of the last rescale is not why it stalls"
        assert ctl("jobs watch run --rescale")[1].endswith(f"; {paused}\n")

    def test_job_is_removed_when_aborted_or_with_force(self, ctl: Ctl) -> None:
        code, _, err = ctl("jobs rm run")
        assert code == 3
        assert "job run has 2 workers (abort it first (`forgectl jobs abort run`), or use --force)" in err
        assert ctl("jobs rm run --force")[0] == 0
        assert [job["name"] for job in json.loads(ctl("jobs ls --json")[1])["jobs"]] == ["idle"]

    def test_drain_below_min_workers_prints_a_note(self, ctl: Ctl) -> None:
        assert "training will stop: 1 worker left, min_workers is 2" in ctl("workers drain w0")[1]
        assert "training will stop: no worker left, min_workers is 2" in ctl("workers drain w1")[1]

    def test_invalid_settings_are_refused_with_all_errors(self, ctl: Ctl) -> None:
        for line in ("jobs create new", "jobs change run"):
            code, _, err = ctl(f"{line} min_workers=0 max_workers=foo stall_timeout=5 mine=1")
            assert code == 3
            assert all(
                key in err for key in ("min_workers must be ", "max_workers must be ", "mean `stall_timeout_ms`?")
            )

    @pytest.mark.parametrize("line", ["jobs pause nojob", "jobs rescale nojob", "plan --job nojob --workers 2"])
    def test_unknown_job_is_reported(self, ctl: Ctl, line: str) -> None:
        code, _, err = ctl(line)
        assert code == 3
        assert "there is no job 'nojob' (see `forgectl jobs ls`)" in err

    def test_a_job_without_members_has_no_training(self, ctl: Ctl) -> None:
        assert ctl("workers ls --job idle")[1] == "no workers\n"
        assert "training" not in json.loads(ctl("jobs show idle --json")[1])
        assert ctl("workers ls --job nobody")[0] == 3
        assert "no worker has joined" in ctl("jobs pause idle")[2]
