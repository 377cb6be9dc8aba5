"""`forgectl data`, and training data in other commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forged.cli.forgectl import candidates, fact_sentences, main
from forged.cli.forgectl.commands import data
from tests.cli.scripted_daemon import UNKNOWN, Refusal, ScriptedDaemon, scripted_daemon
from tests.client.simulated_workers import train_with_data
from tests.client.threaded_daemon import ThreadedDaemon

Caught = pytest.CaptureFixture[str]

DATASET = {"samples": 1000, "shards": 40, "replication": 1, "has_origin": True}
HELD = [
    {"worker_id": "a", "owned": 20, "copies": 20, "samples": 500},
    {"worker_id": "e", "owned": 20, "copies": 20, "samples": 500},
]
VIEW = {"job": "run", "dataset": DATASET, "generation": 5, "workers": HELD}
TOTALS = {
    "shards": 12, "transfers": 24, "from_owners": 20, "from_replicas": 4, "from_origin": 0, "bytes": 480_000,
    "estimated_s": 0.0096,
}  # fmt: skip
DATALESS = Refusal(
    "refused", "job_without_data", "job 'run' has no dataset", "start its workers with `data=` (docs/data.md)"
)


def complete_audit(epoch: int, **changes: Any) -> dict[str, Any]:
    """The audit of a complete epoch, with these changes."""
    return {
        "job": "run", "epoch": epoch, "samples": 1000, "used": 1000, "dropped": 0, "complete": True,
        "missing_total": 0, "missing": [], "repeated_total": 0, "repeated": [], "forgotten": False,
        "epochs": [0, 1, 2],
    } | changes  # fmt: skip


BEGUN = complete_audit(2, used=490, complete=False, missing_total=510, missing=[[490, 1000]])


class ScriptedAudits(dict[str, Any]):
    """Replies of a daemon; the reply to an audit depends on the requested epoch."""

    def __init__(self, *audits: Any) -> None:
        super().__init__(AuditData="one of them")
        self.audits = list(audits)

    def get(self, key: str, default: Any = None) -> Any:
        return self.audits.pop(0) if key == "AuditData" else super().get(key, default)


@pytest.fixture
def answers() -> dict[str, Any]:
    return {
        "ListJobs": {"jobs": [{"name": "run"}], "more": False},
        "ShowData": VIEW,
    }


@pytest.fixture
def daemon(tmp_path: Path, answers: dict[str, Any]) -> Iterator[ScriptedDaemon]:
    with scripted_daemon(tmp_path, answers) as daemon:
        yield daemon


class TestShow:
    def test_lost_shards_are_shown_with_their_last_holders(
        self, answers: Any, daemon: ScriptedDaemon, capsys: Caught
    ) -> None:
        answers["ShowData"] = VIEW | {"lost": 2, "lost_shards": [3, 4], "last_held_by": ["w3"]}
        lines = daemon.run("data show --job run", capsys)[1].splitlines()
        assert "the lost shards were last held by w3: restart it with its directory" in lines
        assert [line.split() for line in lines if line.startswith("lost")][:2] == [
            ["lost", "2"],
            ["lost_shards", "3,", "4"],
        ]
        answers["ShowData"] = VIEW | {"lost": 0, "lost_shards": [], "last_held_by": []}
        assert "lost" not in daemon.run("data show --job run", capsys)[1]

    def test_dataset_is_shown_above_the_shards_of_each_worker(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        assert daemon.run("data show --job run", capsys)[1].splitlines() == [
            "job         run",
            "dataset     1,000 samples in 40 shards, 1 replica of each, with an origin",
            "generation  5",
            "",
            "worker_id  owned  copies  samples",
            "a             20      20      500",
            "e             20      20      500",
        ]

    def test_weights_are_shown_when_one_differs_from_1(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ShowData"] = VIEW | {"workers": [HELD[0] | {"weight": 1.0}, HELD[1] | {"weight": 3.0}]}
        assert [line.split() for line in daemon.run("data show --job run", capsys)[1].splitlines()[-3:]] == [
            ["worker_id", "owned", "copies", "samples", "weight"],
            ["a", "20", "20", "500", "1.0"],
            ["e", "20", "20", "500", "3.0"],
        ]
        answers["ShowData"] = VIEW | {"workers": [one | {"weight": 1.0} for one in HELD]}
        assert "weight" not in daemon.run("data show --job run", capsys)[1]
        assert daemon.json("data show --job run", capsys) == answers["ShowData"]

    def test_differing_copies_are_shown(self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught) -> None:
        answers["ShowData"] = VIEW | {"differing": 2, "differing_shards": [3, 4]}
        assert [line.split() for line in daemon.run("data show --job run", capsys)[1].splitlines()[3:5]] == [
            ["differing", "2"],
            ["differing_shards", "3,", "4"],
        ]
        answers["ShowData"] = VIEW | {"differing": 0, "differing_shards": []}
        assert "differing" not in daemon.run("data show --job run", capsys)[1]

    def test_json_output_is_the_reply(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        assert daemon.json("data show --job run", capsys) == VIEW
        assert daemon.requests == [("ShowData", {"job": "run"})]

    @pytest.mark.parametrize("line", ["data", "data ls", "data list"])
    def test_all_datasets_are_a_table(self, daemon: ScriptedDaemon, capsys: Caught, line: str) -> None:
        header, row = daemon.run(line, capsys)[1].splitlines()
        assert header.split() == ["job", "samples", "shards", "replication", "has_origin", "generation", "workers"]
        assert row.split() == ["run", "1000", "40", "1", "yes", "5", "2"]
        assert daemon.json(line, capsys) == {"data": [VIEW]}

    def test_jobs_without_data_are_omitted(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ShowData"] = DATALESS
        assert daemon.run("data", capsys) == (0, "no job has a dataset\n", "")

    def test_named_job_without_data_is_refused(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ShowData"] = DATALESS
        code, out, err = daemon.run("data show --job run", capsys)
        assert (code, out) == (3, "")
        assert "has no dataset" in err

    def test_other_refusals_exit_with_3(self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught) -> None:
        answers["ShowData"] = Refusal("refused", "forbidden", "not yours")
        assert daemon.run("data", capsys)[0] == 3

    @pytest.mark.parametrize(
        "view",
        [
            {},
            {"dataset": 7, "workers": 7},
            {"workers": [7, {}]},
            {"workers": [{"weight": "x"}, {"weight": []}]},
            {"dataset": {"samples": "x"}},
        ],
    )
    def test_replies_with_missing_fields_are_shown(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, view: dict[str, Any]
    ) -> None:
        answers["ShowData"] = view
        assert daemon.run("data show --job run", capsys)[0] == 0
        assert daemon.run("data", capsys)[0] == 0


class TestAudit:
    def run(self, directory: Path, capsys: Caught, *audits: Any, flags: str = "") -> tuple[int, list[str], str]:
        with scripted_daemon(directory, ScriptedAudits(*audits)) as daemon:
            code, out, err = daemon.run(f"data audit --job run {flags}", capsys)
        return code, out.splitlines(), err

    def test_equal_audits_of_consecutive_epochs_are_one_line(self, tmp_path: Path, capsys: Caught) -> None:
        assert self.run(tmp_path, capsys, BEGUN, complete_audit(0), complete_audit(1)) == (
            0,
            [
                "epochs 0 to 1: 1,000 of 1,000 samples used once in each",
                "epoch 2: 490 of 1,000 samples used once; the epoch is still running",
            ],
            "",
        )

    def test_only_the_named_epoch_is_audited(self, tmp_path: Path, capsys: Caught) -> None:
        said = self.run(tmp_path, capsys, complete_audit(1), flags="--epoch 1")
        assert said == (0, ["epoch 1: 1,000 of 1,000 samples used once"], "")

    def test_samples_dropped_by_configuration_are_counted(self, tmp_path: Path, capsys: Caught) -> None:
        said = self.run(tmp_path, capsys, complete_audit(1, used=990, dropped=10), flags="--epoch 1")
        assert said == (0, ["epoch 1: 990 of 1,000 samples used once, 10 dropped by configuration"], "")

    def test_contradicting_reports_fail_and_name_the_workers(self, tmp_path: Path, capsys: Caught) -> None:
        conflicts = [{"step": 8 + number, "worker_id": "b"} for number in range(10)]
        unclear = complete_audit(2, complete=False, conflicts=conflicts)
        code, lines, err = self.run(tmp_path, capsys, unclear, flags="--epoch 2")
        assert (code, err) == (1, "")
        named = ", ".join(f"b at step {step}" for step in range(8, 16))
        assert lines == [
            "epoch 2: 1,000 of 1,000 samples used once, as far as the reports agree",
            f"  workers contradict each other, so their reports prove nothing: {named} and 2 more",
        ]

    def test_finished_epoch_with_missing_samples_fails_and_lists_them(self, tmp_path: Path, capsys: Caught) -> None:
        short = complete_audit(0, used=950, complete=False, missing_total=50, missing=[[100, 140], [200, 210]])
        code, lines, err = self.run(tmp_path, capsys, short, flags="--epoch 0")
        assert (code, err) == (1, "")
        assert lines == [
            "epoch 0: 950 of 1,000 samples used once; the epoch is over and incomplete",
            "  not reported as used: 50 positions: [100, 140), [200, 210)",
        ]

    def test_unreported_epoch_between_reported_ones_fails(self, tmp_path: Path, capsys: Caught) -> None:
        nothing = complete_audit(1, used=0, complete=False, missing_total=1000, missing=[[0, 1000]], epochs=[0, 2])
        code, lines, _ = self.run(tmp_path, capsys, BEGUN | {"epochs": [0, 2]}, complete_audit(0), nothing)
        assert code == 1
        assert lines[1] == "epoch 1: 0 of 1,000 samples used once; the epoch is over and incomplete"

    def test_repeated_samples_fail_while_the_epoch_is_running(self, tmp_path: Path, capsys: Caught) -> None:
        twice = BEGUN | {"repeated_total": 10, "repeated": [[0, 10]]}
        code, lines, _ = self.run(tmp_path, capsys, twice, flags="--epoch 2")
        assert code == 1
        assert lines == [
            "epoch 2: 480 of 1,000 samples used once; the epoch is still running",
            "  used more than once: 10 positions: [0, 10)",
        ]

    def test_forgotten_usage_is_given_as_the_reason(self, tmp_path: Path, capsys: Caught) -> None:
        forgotten = complete_audit(0, used=0, complete=False, missing_total=1000, missing=[[0, 1000]], forgotten=True)
        code, lines, _ = self.run(tmp_path, capsys, forgotten, flags="--epoch 0")
        assert code == 1
        assert "restored to the middle of this epoch" in lines[1]

    def test_long_lists_of_ranges_are_shortened(self, tmp_path: Path, capsys: Caught) -> None:
        ranges = [[at, at + 1] for at in range(0, 40, 2)]
        short = complete_audit(0, used=980, complete=False, missing_total=20, missing=ranges)
        lines = self.run(tmp_path, capsys, short, flags="--epoch 0")[1]
        assert lines[1].endswith("[14, 15) and 12 more ranges")

    def test_epoch_that_has_not_begun_is_no_failure(self, tmp_path: Path, capsys: Caught) -> None:
        nothing = complete_audit(9, used=0, complete=False, missing_total=1000, missing=[[0, 1000]])
        said = self.run(tmp_path, capsys, nothing, flags="--epoch 9")
        assert said == (0, ["epoch 9: 0 of 1,000 samples used once; the epoch is still running"], "")

    def test_json_lists_every_epoch_and_whether_it_is_over(self, tmp_path: Path, capsys: Caught) -> None:
        with scripted_daemon(tmp_path, ScriptedAudits(BEGUN, complete_audit(0), complete_audit(1))) as daemon:
            told = daemon.json("data audit --job run", capsys)
            asked = daemon.requests
        assert [one[1]["epoch"] for one in asked] == [None, 0, 1]
        assert (told["job"], told["ok"], told["epochs_left_out"]) == ("run", True, 0)
        assert [(one["epoch"], one["over"], one["complete"]) for one in told["audits"]] == [
            (0, True, True),
            (1, True, True),
            (2, False, False),
        ]
        assert told["audits"][2]["missing"] == [[490, 1000]]

    def test_only_the_newest_epochs_are_audited(
        self, tmp_path: Path, capsys: Caught, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(data, "EPOCHS_AUDITED_MAX", 2)
        lines = self.run(tmp_path, capsys, BEGUN, complete_audit(1))[1]
        assert lines[0] == "1 older epoch not audited: choose one with --epoch"
        assert [line.partition(":")[0] for line in lines[1:]] == ["epoch 1", "epoch 2"]

    def test_job_without_reported_steps_is_refused(self, tmp_path: Path, capsys: Caught) -> None:
        code, lines, err = self.run(tmp_path, capsys, Refusal("refused", "usage_none", "no step was reported yet"))
        assert (code, lines) == (3, [])
        assert "no step was reported yet" in err

    @pytest.mark.parametrize(
        "audit",
        [{}, {"epochs": 7}, {"epochs": [-(10**18), 1 << 63, True]}, {"epoch": "x", "missing": 7, "repeated_total": []}],
    )
    def test_audits_with_missing_fields_are_shown(self, tmp_path: Path, capsys: Caught, audit: dict[str, Any]) -> None:
        assert self.run(tmp_path, capsys, audit)[0] == 0

    @pytest.mark.parametrize("epoch", ["-1", "x", "1.5", "", "9" * 30])
    def test_invalid_epoch_is_wrong_usage(self, epoch: str, capsys: Caught) -> None:
        with pytest.raises(SystemExit) as left:
            main.main(["data", "audit", "--job", "run", f"--epoch={epoch}"])
        assert left.value.code == 2
        assert "an epoch must be an integer >= 0" in capsys.readouterr().err


class TestPlan:
    PLAN = {  # noqa: RUF012
        "world_size": 2, "new_world_size": 2,
        "workers": [
            {"id": "w1", "rank": 1, "new_rank": 1},
            {"id": "w0", "rank": 0, "new_rank": 0},
            {"id": "w2", "rank": 2, "new_rank": -1},
        ],
    }  # fmt: skip

    def test_planned_transfers_are_shown_below_the_ranks(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers |= {"PlanRescale": self.PLAN, "PlanData": TOTALS}
        assert daemon.run("plan --job run --workers 2", capsys)[1].splitlines()[-5:] == [
            "",
            "shards     12",
            "transfers  24 (20 from owners, 4 from replicas)",
            "bytes      480 kB",
            "estimated  9.6 ms",
        ]
        assert daemon.requests[-1] == ("PlanData", {"job": "run", "workers": ["w0", "w1"]})

    def test_gone_workers_are_sent_with_the_plan_request(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers |= {"PlanRescale": self.PLAN | {"gone": ["w2"]}, "PlanData": TOTALS}
        daemon.run("plan --job run --workers 2", capsys)
        assert daemon.requests[-1] == ("PlanData", {"job": "run", "workers": ["w0", "w1"], "gone": ["w2"]})

    def test_json_contains_the_planned_transfers(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers |= {"PlanRescale": self.PLAN, "PlanData": TOTALS}
        assert daemon.json("plan --job run --workers 2", capsys) == self.PLAN | {"data": TOTALS}

    def test_plan_without_transfers_says_so(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers |= {"PlanRescale": self.PLAN, "PlanData": dict.fromkeys(TOTALS, 0)}
        said = daemon.run("plan --job run --workers 2", capsys)[1]
        assert said.endswith("\n\nno shard moves\n")

    @pytest.mark.parametrize("answer", [DATALESS, UNKNOWN])
    def test_plan_of_a_job_without_data_has_no_transfers(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, answer: Refusal
    ) -> None:
        answers |= {"PlanRescale": self.PLAN, "PlanData": answer}
        assert daemon.json("plan --job run --workers 2", capsys) == self.PLAN
        assert daemon.run("plan --job run --workers 2", capsys)[1].splitlines()[-1].split() == ["w2", "2", "-"]

    def test_other_refusals_exit_with_3(self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught) -> None:
        answers |= {"PlanRescale": self.PLAN, "PlanData": Refusal("refused", "forbidden", "not yours")}
        assert daemon.run("plan --job run --workers 2", capsys)[0] == 3


class TestFactSentences:
    @pytest.mark.parametrize(
        ("kind", "fact", "said"),
        [
            (
                "DatasetDefined",
                {"dataset": DATASET | {"replication": 0, "has_origin": False}},
                "the workers train with 1,000 samples in 40 shards, no replicas, without an origin",
            ),
            (
                "TransfersPlanned",
                {"attempt": 2, "totals": TOTALS},
                "attempt 2: 24 transfers, 20 from owners, 4 from replicas, 480 kB, estimated 9.6 ms",
            ),
            (
                "TransfersPlanned",
                {"attempt": 1, "totals": {"transfers": 1, "from_origin": 1, "bytes": 0, "estimated_s": None}},
                "attempt 1: 1 transfer, 1 from the origin",
            ),
            ("TransfersPlanned", {"attempt": 5, "totals": {"transfers": 0}}, "attempt 5: no shard moves"),
            (
                "TransfersCompleted",
                {"attempt": 2, "transfers": 24, "bytes": 480_000, "took_s": 0.036, "estimated_s": 0.0096},
                "attempt 2: all workers hold their data, 24 shards transferred, 480 kB, in 36 ms (estimated 9.6 ms)",
            ),
            (
                "TransfersCompleted",
                {"attempt": 5, "transfers": 0, "bytes": 0, "took_s": 0.036, "estimated_s": None},
                "attempt 5: all workers hold their data, in 36 ms",
            ),
            (
                "ShardsLost",
                {"attempt": 2, "count": 30, "shards": list(range(20))},
                "attempt 2: no worker has 30 shards, such as 0, 1, 2, 3, 4, 5, 6, 7 and 12 more",
            ),
            (
                "ShardsLost",
                {"attempt": 2, "count": 2, "shards": [3, 4], "last_held_by": ["w3", "w4"]},
                "attempt 2: no worker has 2 shards, such as 3, 4; "
                "last held by w3, w4: restart each of them with its directory",
            ),
            (
                "CopiesDiffer",
                {"attempt": 2, "count": 1, "shards": [3], "workers": ["w1"]},
                "attempt 2: the copies of 1 shard differ, such as 3; the different copies are on w1",
            ),
            (
                "CorruptShardFound",
                {"worker_id": "w0", "shard": 7, "found_by": "w1"},
                "w0 has a corrupt copy of shard 7, found by w1",
            ),
        ],
    )
    def test_data_facts_have_sentences(self, kind: str, fact: dict[str, Any], said: str) -> None:
        assert fact_sentences.in_words(kind, fact) == said


@pytest.mark.parametrize("typed", [["data", "show", "--job", ""], ["data", "audit", "--job", "r"]])
def test_job_names_are_completed(daemon: ScriptedDaemon, typed: list[str]) -> None:
    words = ["--socket", str(daemon.path), *typed]
    assert candidates.candidates(main._parser(), words) == [("run", "")]


class TestRealDaemon:
    """A daemon with a worker that has trained for an epoch and a half."""

    @pytest.fixture
    def ctl(self, threaded_daemon: ThreadedDaemon, tmp_path: Path, capsys: Caught) -> Callable[[str], tuple[int, str]]:
        train_with_data(threaded_daemon.runner.endpoint, "run", "w0", tmp_path / "shards", 15)

        def run(line: str) -> tuple[int, str]:
            code = main.main(["--socket", threaded_daemon.socket, *line.split()])
            return code, capsys.readouterr().out

        return run

    def test_show_audit_and_plan_work_after_training(self, ctl: Callable[[str], tuple[int, str]]) -> None:
        assert ctl("data audit --job run") == (
            0,
            "epoch 0: 100 of 100 samples used once\nepoch 1: 50 of 100 samples used once; the epoch is still running\n",
        )
        shown = ctl("data show --job run")[1]
        assert "100 samples in 5 shards, no replicas, with an origin" in shown
        assert shown.splitlines()[-1].split() == ["w0", "5", "0", "100"]
        assert ctl("transfers --job run")[1].startswith(
            "attempt 1: all workers hold their data; 5 shards transferred, 800 B"
        )
        assert ctl("plan --job run --workers 2")[0] == 3, "the job is over"
        assert "5 transfers, 5 from the origin" in ctl("events")[1]
        assert ctl("data")[1].splitlines()[1].split()[:3] == ["run", "100", "5"]
