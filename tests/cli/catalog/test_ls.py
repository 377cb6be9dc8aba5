"""`forgectl ckpt ls --job`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forged.catalog.messages import CheckpointStarted
from forged.cli.catalog import ls
from forged.cli.forgectl.connection import DaemonConnection
from forged.kernel.messages import FACTS
from tests.cli.catalog.scripted_catalogue import Caught, catalogue, on_terminal, record
from tests.cli.scripted_daemon import UNKNOWN, Refusal

METAS = [
    record(5, state="creating", size_bytes=0),
    record(4, checkpoint_type="incremental", parent_id="ckpt-00000003", size_bytes=120_000_000),
    record(3, pinned=True, holders=["w0", "w1"], metrics={"loss": 0.0833333, "accuracy": 0.5}),
    record(2, state="corrupted"),
    record(1, abandoned=True, checkpoint_type="emergency"),
]


@pytest.fixture
def shown(tmp_path: Path, capsys: Caught) -> list[str]:
    with catalogue(tmp_path, *METAS) as daemon:
        code, out, err = daemon.run("ckpt ls --job run", capsys)
    assert (code, err) == (0, "")
    return out.splitlines()


def test_each_checkpoint_is_a_row(shown: list[str]) -> None:
    assert shown[:6] == [
        "id             step  epoch  type         state                   size       age  metric        path",
        "ckpt-00000005   500      0  full         creating                -        3d00h  -             step-500",
        "ckpt-00000004   400      0  incremental  complete                120 MB   3d00h  -             step-400",
        "ckpt-00000003   300      0  full         complete, pinned, held  2.15 GB  3d00h  loss 0.08333  step-300",
        "ckpt-00000002   200      0  full         corrupted               2.15 GB  3d00h  -             step-200",
        "ckpt-00000001   100      0  emergency    complete, abandoned     2.15 GB  3d00h  -             step-100",
    ]


def test_summary_has_number_size_folder_and_cadence(shown: list[str]) -> None:
    assert shown[6:] == [
        "",
        "5 checkpoints, 6.57 GB, in /data/run",
        "saves every 600 s: a save costs 10 s, 1 failure in 5.0 h",
    ]


def test_command_without_a_verb_lists(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, *METAS) as daemon:
        assert daemon.run("ckpt --job run", capsys) == daemon.run("ckpt ls --job run", capsys)


def test_metric_of_the_job_is_shown(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, *METAS, ShowJob={"settings": {"checkpoint_metric": "accuracy"}}) as daemon:
        assert "  accuracy 0.5  " in daemon.run("ckpt ls --job run", capsys)[1]


def test_metric_of_an_unknown_job_is_the_loss(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, *METAS, ShowJob=Refusal("refused", "job_unknown")) as daemon:
        assert "  loss 0.08333  " in daemon.run("ckpt ls --job run", capsys)[1]


def test_metrics_are_left_out_if_there_are_none(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, record(1)) as daemon:
        assert "metric" not in daemon.run("ckpt ls --job run", capsys)[1]


def test_empty_list_says_how_checkpoints_come_into_it(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path) as daemon:
        said = daemon.run("ckpt ls --job run", capsys)[1]
    assert said.startswith("job run has no checkpoints: its workers report those that they save;")
    assert "`forgectl ckpt adopt FOLDER --job run`" in said


def test_json_is_the_reply_with_all_pages(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, *METAS, page=2) as daemon:
        reply = daemon.json("ckpt ls --job run", capsys)
    assert reply["checkpoints"] == METAS
    assert (reply["count"], reply["more"], reply["size_bytes"]) == (5, False, 6_570_000_000)


def test_pipe_gets_all_pages(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, *map(record, range(1200, 0, -1))) as daemon:
        assert len(daemon.run("ckpt ls --job run", capsys)[1].splitlines()) == 1 + 1200 + 3


def test_terminal_gets_the_first_page_unless_all_is_given(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, *map(record, range(1200, 0, -1))) as daemon:
        first = on_terminal(daemon, "ckpt ls --job run", capsys, 100)
        assert [fields for method, fields in daemon.requests if method == "ListCheckpoints"] == [
            {"job": "run", "after": "", "limit": ls.SHOWN_MAX}
        ]
        assert len(on_terminal(daemon, "ckpt ls --job run --all", capsys, 100)) == 1 + 1200 + 3
    assert first[1 + ls.SHOWN_MAX] == "and 1,160 more checkpoints: --all shows them"
    assert first[-2] == "1,200 checkpoints, 2.6 TB, in /data/run"


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_fit_the_terminal_with_whole_ids(tmp_path: Path, capsys: Caught, columns: int) -> None:
    wide = [meta | {"checkpoint_id": f"{meta['step']:032x}"} for meta in METAS]
    with catalogue(tmp_path, *wide) as daemon:
        lines = on_terminal(daemon, "ckpt ls --job run", capsys, columns)
    assert max(map(len, lines)) <= columns
    assert [line[:32] for line in lines[1:6]] == [meta["checkpoint_id"] for meta in wide]


@pytest.mark.parametrize(
    ("paths", "folder"),
    [
        ([], ""),
        (["/a/b/c"], "/a/b"),
        (["/a/b/c", "/a/b/d"], "/a/b"),
        (["/a/b/c", "/a/x/d"], "/a"),
        (["/a/b", "/ab/c"], ""),
        (["s3://bucket/run/a", "s3://bucket/run/b"], "s3://bucket/run"),
        (["s3://bucket/a", "s3://other/b"], ""),
        (["s3://bucket/a", "/a/b"], ""),
    ],
)
def test_common_folder_holds_all_paths(paths: list[str], folder: str) -> None:
    assert ls.common_folder(paths) == folder


@pytest.mark.parametrize(
    "reply",
    [
        {"checkpoints": [{}]},
        {"checkpoints": [{"metrics": 7, "holders": 7, "created_at": "x", "size_bytes": "x", "storage_path": 7}]},
        {"checkpoints": [{"checkpoint_id": "\x1b[2J", "state": "\x1b", "storage_path": "\x1b/x"}], "cadence": "\x1b"},
        {"checkpoints": [], "count": "x"},
    ],
)
def test_replies_of_other_versions_are_shown(tmp_path: Path, capsys: Caught, reply: dict[str, Any]) -> None:
    with catalogue(tmp_path, ListCheckpoints=reply) as daemon:
        code, out, err = daemon.run("ckpt ls --job run", capsys)
    assert (code, err) == (0, "")
    assert "\x1b" not in out


FACT = [
    3, 0.0, "CheckpointFailed", "run", 1, 0, "worker w0",
    {"checkpoint_id": "ckpt-00000006", "step": 600, "reason": "the disk is full"},
]  # fmt: skip


def test_all_facts_about_checkpoints_are_followed() -> None:
    assert set(ls.FACTS) == {name for name, kind in FACTS.items() if kind.__module__ == CheckpointStarted.__module__}


class TestFollow:
    @pytest.fixture
    def followed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Following ends at the first fact."""

        def first(options: Any, read: Any) -> Any:
            with DaemonConnection(options) as daemon:
                yield next(read(daemon))

        monkeypatch.setattr(ls, "over_restarts", first)

    @pytest.mark.usefixtures("followed")
    def test_facts_follow_the_list(self, tmp_path: Path, capsys: Caught) -> None:
        with catalogue(tmp_path, *METAS, facts=[FACT]) as daemon:
            lines = daemon.run("ckpt ls --job run --follow", capsys)[1].splitlines()
        assert lines[1].startswith("ckpt-00000005 ")
        assert "the disk is full" in lines[-1]

    @pytest.mark.usefixtures("followed")
    def test_json_has_the_list_and_then_a_line_per_fact(self, tmp_path: Path, capsys: Caught) -> None:
        with catalogue(tmp_path, *METAS, facts=[FACT]) as daemon:
            first, second = daemon.run("ckpt ls --job run -f --json", capsys)[1].splitlines()
        assert json.loads(first)["checkpoints"] == METAS
        assert json.loads(second)["fact"] == FACT[-1]


def test_job_that_does_not_exist_is_refused(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, ListCheckpoints=Refusal("refused", "job_unknown", "there is no job 'run'")) as daemon:
        code, out, err = daemon.run("ckpt ls --job run", capsys)
    assert (code, out) == (3, "")
    assert "there is no job 'run'" in err


def test_older_daemon_is_named(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, ListCheckpoints=UNKNOWN) as daemon:
        assert "the daemon is forged/0.1.0" in daemon.run("ckpt ls --job run", capsys)[2]
