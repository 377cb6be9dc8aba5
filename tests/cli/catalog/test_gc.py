"""`forgectl ckpt gc`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forged.cli.catalog.ls import SHOWN_MAX
from tests.cli.catalog.scripted_catalogue import Caught, catalogue, on_terminal


def verdict(number: int, *, is_kept: bool) -> dict[str, Any]:
    return {
        "checkpoint_id": f"ckpt-{number}",
        "step": 100 * number,
        "is_kept": is_kept,
        "rule": "newest" if is_kept else "surplus",
        "reason": "the newest restorable checkpoint" if is_kept else "1 newer one is restorable",
        "size_bytes": 1_000_000_000,
    }


VERDICTS = [verdict(3, is_kept=True), verdict(2, is_kept=False), verdict(1, is_kept=False)]
PAGE = {"verdicts": VERDICTS, "more": False, "regained_bytes": 2_000_000_000}
COLLECTION = {"collected": VERDICTS[1:], "regained_bytes": 2_000_000_000}


def test_preview_shows_what_goes_first_with_reasons_and_the_bytes(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, ReadRetention=PAGE) as daemon:
        code, out, err = daemon.run("ckpt gc --job run --dry-run", capsys)
        assert [method for method, _ in daemon.requests] == ["ReadRetention"]
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "id      step  verdict  rule     size  reason",
        "ckpt-2   200  goes     surplus  1 GB  1 newer one is restorable",
        "ckpt-1   100  goes     surplus  1 GB  1 newer one is restorable",
        "ckpt-3   300  kept     newest   1 GB  the newest restorable checkpoint",
        "",
        "a collection would delete 2 of 3 checkpoints and regain 2 GB",
    ]


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        (
            "recent",
            "; the settings checkpoint_keep and checkpoint_max_age_s limit them (`forgectl jobs show run`), "
            "or `keep=` of the script if there are none",
        ),
        ("parent", ""),
    ],
)
def test_preview_without_deletions_names_the_settings_that_would_help(
    tmp_path: Path, capsys: Caught, rule: str, hint: str
) -> None:
    page = {"verdicts": [VERDICTS[0] | {"rule": rule}], "more": False, "regained_bytes": 0}
    with catalogue(tmp_path, ReadRetention=page) as daemon:
        said = daemon.run("ckpt gc --job run --dry-run", capsys)[1].splitlines()[-1]
    assert said == f"a collection would delete none of 1 checkpoint{hint}"


def test_preview_of_no_checkpoints_says_so(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, ReadRetention={"verdicts": [], "more": False, "regained_bytes": 0}) as daemon:
        assert daemon.run("ckpt gc --job run --dry-run", capsys) == (0, "job run has no checkpoints\n", "")


@pytest.mark.parametrize("columns", [80, 120])
def test_long_preview_is_cut_on_a_terminal(tmp_path: Path, capsys: Caught, columns: int) -> None:
    page = PAGE | {"verdicts": [verdict(number, is_kept=number > 100) for number in range(1000, 0, -1)]}
    with catalogue(tmp_path, ReadRetention=page) as daemon:
        lines = on_terminal(daemon, "ckpt gc --dry-run --job run", capsys, columns)
        assert len(on_terminal(daemon, "ckpt gc --dry-run --job run --all", capsys, columns)) == 1 + 1000 + 2
    assert max(map(len, lines)) <= columns
    assert lines[SHOWN_MAX] == "and 961 more checkpoints: --all shows them"
    assert lines[-1] == "a collection would delete 100 of 1,000 checkpoints and regain 2 GB"


def test_collection_shows_what_was_collected(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, CollectCheckpoints=COLLECTION) as daemon:
        code, out, err = daemon.run("ckpt gc --job run", capsys)
        assert daemon.requests == [("CollectCheckpoints", {"job": "run"})]
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "id      step  rule     size  reason",
        "ckpt-2   200  surplus  1 GB  1 newer one is restorable",
        "ckpt-1   100  surplus  1 GB  1 newer one is restorable",
        "",
        "collected 2 checkpoints, 2 GB; their files are being deleted",
    ]


def test_collection_of_nothing_says_where_the_reasons_are(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, CollectCheckpoints={"collected": [], "regained_bytes": 0}) as daemon:
        out = daemon.run("ckpt gc --job run", capsys)[1]
    assert out.startswith("no checkpoint of job run is collected; `forgectl ckpt gc --dry-run --job run` tells why")


def test_json_is_the_reply(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, ReadRetention=PAGE, CollectCheckpoints=COLLECTION) as daemon:
        assert daemon.json("ckpt gc --job run --dry-run", capsys) == PAGE
        assert daemon.json("ckpt gc --job run", capsys) == COLLECTION
