"""The names of checkpoints on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.catalog.scripted_catalogue import Caught, catalogue, record
from tests.cli.scripted_daemon import ScriptedDaemon

METAS = [record(number) for number in (12, 11, 3, 2)]
POINTS = {"points": [{"meta": METAS[1]}], "excluded": []}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with catalogue(tmp_path, *METAS, record(13, step=300), page=2, FindRestorePoints=POINTS) as daemon:
        yield daemon


def found(daemon: ScriptedDaemon, name: str, capsys: Caught) -> str:
    return str(daemon.json(f"ckpt show {name} --job run", capsys)["meta"]["checkpoint_id"])


def refusal(daemon: ScriptedDaemon, name: str, capsys: Caught) -> dict[str, str]:
    code, out, err = daemon.run(f"ckpt show {name} --job run --json", capsys)
    assert (code, out) == (3, "")
    error: dict[str, str] = json.loads(err)["error"]
    return error


@pytest.mark.parametrize(
    ("name", "number"), [("ckpt-0000000c", 12), ("ckpt-0000000d", 13), ("latest", 11), ("@1200", 12), ("@200", 2)]
)
def test_checkpoint_is_named_by_id_or_step_or_as_latest(
    daemon: ScriptedDaemon, name: str, number: int, capsys: Caught
) -> None:
    assert found(daemon, name, capsys) == f"ckpt-{number:08x}"


def test_beginning_of_an_id_names_the_only_one(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, *(record(1, checkpoint_id=one) for one in ("abcd", "abef", "x"))) as daemon:
        assert found(daemon, "abc", capsys) == "abcd"


def test_whole_id_names_it_although_it_begins_another(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, record(1, checkpoint_id="abc"), record(2, checkpoint_id="ab")) as daemon:
        assert found(daemon, "ab", capsys) == "ab"
        assert "ListCheckpoints" not in [method for method, _ in daemon.requests]


def test_ambiguous_name_is_refused_with_the_candidates(daemon: ScriptedDaemon, capsys: Caught) -> None:
    said = refusal(daemon, "@300", capsys)
    assert said["code"] == "checkpoint_ambiguous"
    assert said["message"] == (
        "'@300' names 2 checkpoints of job run: ckpt-00000003 (step 300), ckpt-0000000d (step 300)"
    )


def test_list_of_candidates_is_shortened(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, *map(record, range(2000, 0, -1))) as daemon:
        said = refusal(daemon, "ckpt", capsys)["message"]
    assert said.startswith("'ckpt' names 2,000 checkpoints of job run: ckpt-000007d0 (step 200000), ")
    assert said.endswith(" and 1,992 more")


@pytest.mark.parametrize("name", ["zzz", "@1", "@", "@x", "ckpt-0000000c0"])
def test_unknown_name_is_refused_with_the_forms(daemon: ScriptedDaemon, name: str, capsys: Caught) -> None:
    said = refusal(daemon, name, capsys)
    assert (said["code"], said["message"]) == ("checkpoint_unknown", f"job run has no checkpoint {name!r}")
    assert "as @STEP or as latest" in said["fix"]


def test_path_with_a_job_is_refused_with_the_fix(daemon: ScriptedDaemon, capsys: Caught) -> None:
    assert refusal(daemon, "/data/run/step-100", capsys)["fix"] == "omit --job to read the path"


def test_latest_of_a_job_without_restore_points_is_refused(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, FindRestorePoints={"points": [], "excluded": []}) as daemon:
        assert refusal(daemon, "latest", capsys)["code"] == "checkpoint_missing"
