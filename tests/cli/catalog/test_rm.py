"""`forgectl ckpt rm --job`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.catalog.scripted_catalogue import Caught, catalogue, record, view_of
from tests.cli.scripted_daemon import Refusal, ScriptedDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with catalogue(tmp_path, record(4), DeleteCheckpoint={}) as daemon:
        yield daemon


def deletions(daemon: ScriptedDaemon) -> list[str]:
    return [fields["checkpoint_id"] for method, fields in daemon.requests if method == "DeleteCheckpoint"]


def test_named_checkpoint_is_deleted(daemon: ScriptedDaemon, capsys: Caught) -> None:
    said = "deleted ckpt-00000004 (step 400), 2.15 GB; its files follow\n"
    assert daemon.run("ckpt rm @400 --job run --yes", capsys) == (0, said, "")
    assert deletions(daemon) == ["ckpt-00000004"]


def test_json_names_the_deleted_checkpoint(daemon: ScriptedDaemon, capsys: Caught) -> None:
    deleted = [{"checkpoint_id": "ckpt-00000004", "size_bytes": 2_150_000_000}]
    assert daemon.json("ckpt rm @400 --job run --yes", capsys) == {"deleted": deleted}


@pytest.mark.parametrize("flags", ["", "--json"])
def test_deletion_needs_consent(daemon: ScriptedDaemon, capsys: Caught, flags: str) -> None:
    code, out, err = daemon.run(f"ckpt rm @400 --job run {flags}", capsys)
    assert (code, out, deletions(daemon)) == (2, "", [])
    assert "this would delete checkpoint ckpt-00000004 (step 400), 2.15 GB, of job run" in err


@pytest.mark.parametrize(("typed", "deleted"), [("y", ["ckpt-00000004"]), ("n", []), ("", [])])
def test_operator_is_asked_on_a_terminal(
    daemon: ScriptedDaemon, capsys: Caught, monkeypatch: pytest.MonkeyPatch, typed: str, deleted: list[str]
) -> None:
    stdin = io.StringIO(f"{typed}\n")
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", stdin)
    code, out, err = daemon.run("ckpt rm @400 --job run", capsys)
    assert (code, deletions(daemon)) == (0 if deleted else 1, deleted)
    assert "continue? [y/N]" in err
    assert out.startswith("deleted " if deleted else "nothing deleted")


def test_files_outside_the_roots_are_left_to_a_worker(tmp_path: Path, capsys: Caught) -> None:
    view = view_of(record(4), is_managed=False)
    with catalogue(tmp_path, ShowCheckpoint=view, DeleteCheckpoint={}) as daemon:
        out = daemon.run("ckpt rm ckpt-00000004 --job run --yes", capsys)[1]
    assert out.endswith("; a worker deletes its files with its next save\n")


def test_refusal_is_passed_on(tmp_path: Path, capsys: Caught) -> None:
    refusal = Refusal("refused", "checkpoint_pinned", "checkpoint ckpt-00000004 is pinned", "unpin it first")
    with catalogue(tmp_path, record(4), DeleteCheckpoint=refusal) as daemon:
        code, out, err = daemon.run("ckpt rm @400 --job run --yes --json", capsys)
    assert (code, out) == (3, "")
    assert json.loads(err)["error"]["fix"] == "unpin it first"
