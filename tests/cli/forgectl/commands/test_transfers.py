"""`forgectl transfers`: once, and with `--follow` in a pipe and on a terminal."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forged.cli.forgectl import candidates, main
from forged.cli.forgectl.commands import events, transfers
from tests.cli.scripted_daemon import Refusal, ScriptedDaemon, scripted_daemon

Caught = pytest.CaptureFixture[str]

TOTALS = {
    "shards": 12, "transfers": 26, "from_owners": 20, "from_replicas": 6, "from_origin": 0, "bytes": 520_000,
    "estimated_s": 0.1,
}  # fmt: skip
A = {"worker_id": "a", "done": 7, "transfers": 7, "bytes": 140_000, "finished": True}
E = {"worker_id": "e", "done": 6, "transfers": 19, "bytes": 120_000, "finished": False}
RUNNING = {
    "job": "run", "attempt": 3, "running": True, "totals": TOTALS, "done": 13, "bytes": 260_000, "elapsed_s": 0.05,
    "waiting_for": [], "workers": [A, E],
}  # fmt: skip
GATHERING = RUNNING | {
    "totals": dict.fromkeys(TOTALS, 0), "done": 0, "bytes": 0, "elapsed_s": 0.01, "waiting_for": ["e"],
    "workers": [one | {"done": 0, "transfers": 0, "bytes": 0, "finished": False} for one in (A, E)],
}  # fmt: skip
OVER = RUNNING | {
    "running": False, "done": 26, "bytes": 520_000, "elapsed_s": 0.09,
    "workers": [A, E | {"done": 19, "bytes": 380_000, "finished": True}],
}  # fmt: skip
LOST = RUNNING | {"done": 0, "bytes": 0, "lost": 3, "lost_shards": [0, 4, 7]}
NONE_YET = Refusal("refused", "transfers_none", "job run has had no transfers yet", "ask later")
WENT = Refusal("refused", "forbidden", "not yours any more")
"""The refusal that ends `--follow`."""


class ScriptedViews(dict[str, Any]):
    """Returns these replies one after the other."""

    def __init__(self, *views: Any) -> None:
        super().__init__(ListJobs={"jobs": [{"name": "run"}], "more": False})
        self.views = [*views, WENT]

    def get(self, key: str, default: Any = None) -> Any:
        return self.views.pop(0) if key == "ShowTransfers" else super().get(key, default)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "POLL_INTERVAL_S", 0)
    monkeypatch.setattr(events, "RECONNECT_PAUSE_S", 0.001)


def followed_lines(directory: Path, capsys: Caught, *views: Any, flags: str = "") -> list[str]:
    """The printed lines until the daemon refuses."""
    with scripted_daemon(directory, ScriptedViews(*views)) as daemon:
        code, out, err = daemon.run(f"transfers --job run --follow {flags}", capsys)
    assert code == 3
    assert "not yours any more" in err
    return out.splitlines()


def terminal_output(
    directory: Path, capsys: Caught, *views: Any, columns: int = 100, term: str = "xterm", flags: str = ""
) -> str:
    """The output on a terminal of 24 lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True)
        for name, value in (("TERM", term), ("COLUMNS", f"{columns}"), ("LINES", "24")):
            patch.setenv(name, value)
        return "\n".join(followed_lines(directory, capsys, *views, flags=flags))


class TestOnce:
    @pytest.fixture
    def daemon(self, tmp_path: Path) -> Iterator[ScriptedDaemon]:
        with scripted_daemon(tmp_path, ScriptedViews(RUNNING)) as daemon:
            yield daemon

    def test_each_worker_has_a_bar_below_the_totals(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        code, out, err = daemon.run("transfers --job run", capsys)
        assert (code, err) == (0, "")
        assert out.splitlines() == [
            "attempt 3: 13 of 26 shards, 260 kB, 5.2 MB/s, after 50 ms of an estimated 100 ms",
            "  a  [########################]        7/7    140 kB",
            "  e  [#######-----------------]       6/19    120 kB",
        ]

    def test_waiting_for_reports_is_shown_before_the_plan(self, tmp_path: Path, capsys: Caught) -> None:
        with scripted_daemon(tmp_path, ScriptedViews(GATHERING)) as daemon:
            said = daemon.run("transfers --job run", capsys)[1]
        assert said == "attempt 3: waiting for e to report the shards they hold\n"

    def test_planning_is_shown_instead_of_no_transfers(self, tmp_path: Path, capsys: Caught) -> None:
        with scripted_daemon(tmp_path, ScriptedViews(GATHERING | {"waiting_for": [], "planned": False})) as daemon:
            said = "attempt 3: planning transfers\n"
            assert daemon.run("transfers --job run", capsys) == (0, said, "")

    def test_lost_shards_are_listed(self, tmp_path: Path, capsys: Caught) -> None:
        with scripted_daemon(tmp_path, ScriptedViews(LOST)) as daemon:
            said = daemon.run("transfers --job run", capsys)[1]
        assert said == "attempt 3: no worker has 3 shards, such as 0, 4, 7; waiting for a worker that has them\n"

    def test_lost_shards_are_shown_with_their_last_holders(self, tmp_path: Path, capsys: Caught) -> None:
        with scripted_daemon(tmp_path, ScriptedViews(LOST | {"last_held_by": ["w3"]})) as daemon:
            said = daemon.run("transfers --job run", capsys)[1]
        assert said == (
            "attempt 3: no worker has 3 shards, such as 0, 4, 7; waiting for a worker that has them; "
            "last held by w3: restart it with its directory\n"
        )

    def test_aborted_job_is_not_shown_as_waiting(self, tmp_path: Path, capsys: Caught) -> None:
        for view, said in (
            (LOST, "attempt 3: no worker has 3 shards, such as 0, 4, 7; the job was aborted\n"),
            (GATHERING, "attempt 3: the job was aborted\n"),
        ):
            with scripted_daemon(tmp_path, ScriptedViews(view | {"aborted": True, "running": False})) as daemon:
                assert daemon.run("transfers --job run", capsys)[1].splitlines(keepends=True)[0] == said

    def test_jobs_show_includes_the_transfers_of_the_rescale(self, tmp_path: Path, capsys: Caught) -> None:
        job = {"name": "run", "settings": {}}
        training = {"phase": "rescaling", "state": {}, "rescale": {"attempt": 3}}
        for view, said in (
            (LOST, "attempt 3: no worker has 3 shards, such as 0, 4, 7; waiting for"),
            (OVER, ""),
            (NONE_YET, ""),
        ):
            replies = ScriptedViews(view, view)
            replies |= {"ShowJob": job, "ShowCluster": training}
            with scripted_daemon(tmp_path, replies) as daemon:
                code, out, _ = daemon.run("jobs show run", capsys)
                assert code == 0
                assert out.partition("\ntransfers: ")[2].startswith(said)
                assert bool(said) == ("\ntransfers: " in out)
                moving = {"transfers": view} if said else {}
                assert daemon.json("jobs show run", capsys) == job | {"training": training} | moving

    @pytest.mark.parametrize("training", [{"phase": "waiting"}, {"phase": "rescaling", "rescale": {"attempt": 4}}])
    def test_jobs_show_omits_transfers_of_another_attempt(
        self, tmp_path: Path, capsys: Caught, training: dict[str, Any]
    ) -> None:
        replies = ScriptedViews(GATHERING, GATHERING)
        replies |= {"ShowJob": {"name": "run"}, "ShowCluster": training}
        with scripted_daemon(tmp_path, replies) as daemon:
            assert "\ntransfers: " not in daemon.run("jobs show run", capsys)[1]

    def test_json_output_is_the_reply(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        assert daemon.json("transfers --job run", capsys) == RUNNING
        assert daemon.requests == [("ShowTransfers", {"job": "run"})]

    def test_job_without_transfers_is_refused(self, tmp_path: Path, capsys: Caught) -> None:
        with scripted_daemon(tmp_path, ScriptedViews(NONE_YET)) as daemon:
            code, out, err = daemon.run("transfers --job run", capsys)
        assert (code, out) == (3, "")
        assert "job run has had no transfers yet" in err

    @pytest.mark.parametrize(
        "view",
        [
            {},
            {"running": True, "totals": 7, "workers": [{}, 7]},
            {"running": True, "workers": [{"worker_id": "\x1b[2J", "done": 9, "transfers": 3, "bytes": "x"}]},
            {"waiting_for": 7, "elapsed_s": "x", "totals": {"estimated_s": "x"}},
        ],
    )
    def test_replies_with_missing_fields_are_shown(self, tmp_path: Path, capsys: Caught, view: dict[str, Any]) -> None:
        with scripted_daemon(tmp_path, ScriptedViews(view)) as daemon:
            code, out, _ = daemon.run("transfers --job run", capsys)
        assert code == 0
        assert out.startswith("attempt -")
        assert "\x1b" not in out

    def test_job_name_is_completed(self, daemon: ScriptedDaemon) -> None:
        words = ["--socket", str(daemon.path), "transfers", "--job", ""]
        assert candidates.candidates(main._parser(), words) == [("run", "")]


class TestFollow:
    def test_follow_in_a_pipe_prints_a_line_per_change(self, tmp_path: Path, capsys: Caught) -> None:
        later = [view | {"elapsed_s": 9.0} for view in (GATHERING, LOST, RUNNING, OVER)]
        views = (GATHERING, later[0], LOST, later[1], RUNNING, later[2], OVER, later[3])
        assert followed_lines(tmp_path, capsys, NONE_YET, *views) == [
            "attempt 3: waiting for e to report the shards they hold",
            "attempt 3: no worker has 3 shards, such as 0, 4, 7; waiting for a worker that has them",
            "attempt 3: 13 of 26 shards, 260 kB, 5.2 MB/s, after 50 ms of an estimated 100 ms: a 7/7, e 6/19",
            "attempt 3: all workers hold their data; 26 shards transferred, 520 kB, in 90 ms; estimated 100 ms",
        ]

    def test_follow_prints_a_json_line_per_change(self, tmp_path: Path, capsys: Caught) -> None:
        lines = followed_lines(tmp_path, capsys, GATHERING, RUNNING, RUNNING, OVER, flags="--json")
        assert [json.loads(line) for line in lines] == [GATHERING, RUNNING, OVER]

    def test_attempt_without_transfers_is_one_line(self, tmp_path: Path, capsys: Caught) -> None:
        nothing = OVER | {"done": 0, "bytes": 0, "totals": dict.fromkeys(TOTALS, 0)}
        assert followed_lines(tmp_path, capsys, nothing) == ["attempt 3: all workers hold their data"]

    def test_worker_without_transfers_is_omitted_from_the_line(self, tmp_path: Path, capsys: Caught) -> None:
        view = RUNNING | {"workers": [A | {"done": 0, "transfers": 0, "bytes": 0}, E]}
        (line,) = followed_lines(tmp_path, capsys, view)
        assert line.endswith("of an estimated 100 ms: e 6/19")
        with scripted_daemon(tmp_path, ScriptedViews(view)) as daemon:
            assert daemon.run("transfers --job run", capsys)[1].splitlines()[1] == "  a  has all its shards"

    def test_many_workers_are_counted(self, tmp_path: Path, capsys: Caught) -> None:
        many = RUNNING | {"workers": [E | {"worker_id": f"w{number}"} for number in range(1000)]}
        (line,) = followed_lines(tmp_path, capsys, many)
        assert line.endswith("w7 6/19 and 992 more")

    def test_follow_continues_after_the_daemon_restarts(self, tmp_path: Path, capsys: Caught) -> None:
        gone = Refusal("unavailable", "stopping", "the daemon is stopping")
        assert len(followed_lines(tmp_path, capsys, RUNNING, gone, OVER)) == 2

    def test_closed_output_ends_the_command(self, tmp_path: Path) -> None:
        class EndlessViews(ScriptedViews):
            def get(self, key: str, default: Any = None) -> Any:
                return RUNNING

        with (
            scripted_daemon(tmp_path, EndlessViews()) as daemon,
            subprocess.Popen(daemon.command("transfers --job run --follow"), stdout=subprocess.PIPE) as following,
        ):
            assert following.stdout is not None
            assert following.stdout.readline()
            following.stdout.close()
            assert following.wait(timeout=30) == 0


class TestTerminal:
    def test_attempt_is_redrawn_in_place(self, tmp_path: Path, capsys: Caught) -> None:
        first, second = terminal_output(tmp_path, capsys, RUNNING, OVER).split("\x1b[3A\x1b[J")
        assert first.splitlines()[2] == "  e  [#######-----------------]       6/19    120 kB"
        assert second.splitlines()[2] == "  e  [########################]      19/19    380 kB"

    def test_next_attempt_is_drawn_below_the_previous_one(self, tmp_path: Path, capsys: Caught) -> None:
        shown = terminal_output(tmp_path, capsys, OVER, RUNNING | {"attempt": 4})
        assert "\x1b" not in shown
        assert re.findall(r"^attempt \d", shown, re.MULTILINE) == ["attempt 3", "attempt 4"]

    def test_more_workers_than_lines_are_counted(self, tmp_path: Path, capsys: Caught) -> None:
        many = RUNNING | {"workers": [E | {"worker_id": f"w{number}"} for number in range(100)]}
        lines = terminal_output(tmp_path, capsys, many).splitlines()
        assert len(lines) == 24 - 1
        assert lines[-1] == "  and 79 more workers"

    def test_no_line_is_wider_than_the_terminal(self, tmp_path: Path, capsys: Caught) -> None:
        assert max(map(len, terminal_output(tmp_path, capsys, RUNNING, columns=30).splitlines())) < 30

    @pytest.mark.parametrize("how", [{"term": "dumb"}, {"flags": "--json"}])
    def test_dumb_terminal_and_json_print_lines(self, tmp_path: Path, capsys: Caught, how: dict[str, Any]) -> None:
        assert "\x1b" not in terminal_output(tmp_path, capsys, RUNNING, OVER, **how)
