"""Replies of daemons of other versions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from forged.cli.forgectl import answers
from forged.errors import PeerError
from forged.plain_client.connection import PlainConnection
from tests.cli.scripted_daemon import scripted_daemon

LONG_S = 60.0
Caught = pytest.CaptureFixture[str]

EVERY_COMMAND = {
    "status": "ReadStatus", "handlers": "ListHandlers", "plugins": "ListPlugins", "jobs": "ListJobs",
    "jobs create a": "CreateJob", "jobs show a": "ShowJob", "jobs change a x=1": "ChangeJob", "tokens": "ListTokens",
    "tokens create a --role viewer": "CreateToken", "tokens revoke a": "RevokeToken", "story 1": "TellStory",
    "config": "ShowConfig", "config reload": "ReloadConfig", "plugins enable a": "EnablePlugin",
}  # fmt: skip
LISTS = {"ListHandlers": "handlers", "ListPlugins": "plugins", "ListJobs": "jobs", "ListTokens": "tokens"}


@contextmanager
def answered(directory: Path, **bodies: Any) -> Iterator[PlainConnection]:
    with (
        scripted_daemon(directory, bodies) as daemon,
        closing(PlainConnection(f"unix://{daemon.path}", None, LONG_S)) as wire,
    ):
        yield wire


@pytest.mark.parametrize("body", [None, 7, "x", True, b"x"])
@pytest.mark.parametrize("line", EVERY_COMMAND)
def test_invalid_reply_is_an_error_that_names_both_versions(
    tmp_path: Path, capsys: Caught, line: str, body: Any
) -> None:
    with scripted_daemon(tmp_path, dict.fromkeys(EVERY_COMMAND.values(), body), agent="forged/9.9.9") as daemon:
        code, out, err = daemon.run(line, capsys)
    assert (code, out) == (1, "")
    assert "(daemon: forged/9.9.9)" in err


@pytest.mark.parametrize("line", EVERY_COMMAND)
@pytest.mark.parametrize("flag", ["", "--json"])
def test_reply_without_known_fields_is_shown(tmp_path: Path, capsys: Caught, line: str, flag: str) -> None:
    """The reply of an older daemon with other field names."""
    bodies: dict[str, Any] = {method: {"earlier": 1} for method in EVERY_COMMAND.values()}
    bodies |= {method: [{"earlier": 1}, {}] for method in ("ListHandlers", "ListPlugins")}
    bodies |= {"ListJobs": {"jobs": [{}, {"earlier": 1}]}, "ListTokens": {"tokens": [{}, {"earlier": 1}]}}
    bodies["TellStory"] = [[1], [], {"earlier": 1}]
    with scripted_daemon(tmp_path, bodies) as daemon:
        code, out, err = daemon.run(f"{line} {flag}", capsys)
    assert (code, err) == (0, "")
    assert out


@pytest.mark.parametrize("method", LISTS)
@pytest.mark.parametrize(
    "shape",
    [
        lambda rows, name: rows,
        lambda rows, name: {name: rows},
        lambda rows, name: {name: rows, "more": False, "later": 1},
    ],
)
def test_list_reply_may_be_bare_or_in_a_field(tmp_path: Path, method: str, shape: Any) -> None:
    rows = [{"name": "a", "later": {}}, "b", 7]
    field = LISTS[method]
    with answered(tmp_path, **{method: shape(rows, field)}) as wire:
        listed = answers.several(wire, method, field=field, key="name")
    assert listed == [{"name": "a", "later": {}}, {"name": "b"}, {"name": 7}]


@pytest.mark.parametrize("last", [{}, {"name": 7}, {"name": ""}])
def test_pages_without_progress_are_an_error(tmp_path: Path, last: dict[str, Any]) -> None:
    with answered(tmp_path, ListJobs={"jobs": [last], "more": True}) as wire, pytest.raises(PeerError):
        answers.pages(wire, "ListJobs", field="jobs", key="name")


def test_repeated_page_is_an_error(tmp_path: Path) -> None:
    with answered(tmp_path, ListJobs={"jobs": [{"name": "a"}], "more": True}) as wire, pytest.raises(PeerError):
        answers.pages(wire, "ListJobs", field="jobs", key="name")


def test_pages_max_limits_the_pages(tmp_path: Path) -> None:
    with answered(tmp_path, ListJobs={"jobs": [{"name": "a"}], "more": True}) as wire:
        assert answers.pages(wire, "ListJobs", field="jobs", key="name", pages_max=1) == [{"name": "a"}]


@pytest.mark.parametrize("said", [{}, {"ticket": b"x"}, {"ticket": "x", "size": 1}, {"ticket": b"x", "size": -1}])
def test_invalid_ticket_is_an_error(tmp_path: Path, said: dict[str, Any]) -> None:
    with answered(tmp_path, BackUp=said) as wire, pytest.raises(PeerError):
        answers.backup(wire)
