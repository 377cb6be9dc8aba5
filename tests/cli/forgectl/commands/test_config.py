"""`forgectl config`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forged.cli.forgectl import main
from tests.cli.scripted_daemon import scripted_daemon
from tests.client.threaded_daemon import ThreadedDaemon

Caught = pytest.CaptureFixture[str]


def setting(key: str, value: Any, default: Any, wanted: Any = None) -> dict[str, Any]:
    return {"key": key, "value": value, "default": default, "live": False, "wanted": wanted}


SHOWN = {
    "source": "/etc/forged/forged.toml",
    "settings": [
        setting("drain_timeout_s", 10.0, 10.0),
        setting("listen", ["tcp://a:1", "tcp://b:2"], ["tcp://127.0.0.1:7433"]),
        setting("socket_mode", 0o660, 0o600),
        setting("http", "", "127.0.0.1:1", "127.0.0.1:80"),
        setting("fast", True, False),
    ],
}


def table(said: str) -> list[list[str]]:
    header, *rows = said.splitlines()[1:]
    starts = [header.index(word) for word in header.split()]
    return [[row[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)] for row in rows]


def test_settings_are_shown_in_the_notation_of_the_file(tmp_path: Path, capsys: Caught) -> None:
    with scripted_daemon(tmp_path, {"ShowConfig": SHOWN}) as daemon:
        code, out, _ = daemon.run("config", capsys)
    assert code == 0
    assert out.startswith("configuration file: /etc/forged/forged.toml\n")
    assert table(out) == [
        ["drain_timeout_s", "10.0", "", ""],
        ["listen", "tcp://a:1, tcp://b:2", "tcp://127.0.0.1:7433", ""],
        ["socket_mode", "0o660", "0o600", ""],
        ["http", '""', "127.0.0.1:1", "after restart: 127.0.0.1:80"],
        ["fast", "true", "false", ""],
    ]


def test_restart_column_is_omitted_when_no_setting_needs_a_restart(tmp_path: Path, capsys: Caught) -> None:
    with scripted_daemon(tmp_path, {"ShowConfig": {"source": None, "settings": [setting("a", 1, 1)]}}) as daemon:
        assert daemon.run("config show", capsys)[1] == "no configuration file\nkey  value  default\na    1\n"


def test_json_output_is_the_reply(tmp_path: Path, capsys: Caught) -> None:
    with scripted_daemon(tmp_path, {"ShowConfig": SHOWN}) as daemon:
        assert daemon.json("config", capsys) == SHOWN


@pytest.mark.parametrize(
    "said", [{}, {"settings": None}, {"settings": [1, {}, {"key": "a", "later": {}}], "later": 1}, {"source": 7}]
)
def test_replies_with_missing_or_additional_fields_are_shown(tmp_path: Path, capsys: Caught, said: Any) -> None:
    with scripted_daemon(tmp_path, {"ShowConfig": said, "ReloadConfig": said}) as daemon:
        assert daemon.run("config", capsys)[0] == 0
        assert daemon.run("config reload", capsys)[0] == 0


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"changed": ["a", "b"], "needs_restart": ["c"]}, "changed: a, b\nneeds a restart: c\n"),
        ({"changed": [], "needs_restart": []}, "no setting changed\n"),
    ],
)
def test_reload_prints_changed_settings(tmp_path: Path, capsys: Caught, said: Any, shown: str) -> None:
    with scripted_daemon(tmp_path, {"ReloadConfig": said}) as daemon:
        assert daemon.run("config reload", capsys) == (0, shown, "")
        assert daemon.json("config reload", capsys) == said


def test_config_of_a_real_daemon_is_shown(threaded_daemon: ThreadedDaemon, capsys: Caught) -> None:
    place = ["--socket", threaded_daemon.socket]
    assert main.main([*place, "config", "--json"]) == 0
    settings_by_key = {one["key"]: one for one in json.loads(capsys.readouterr().out)["settings"]}
    assert settings_by_key["socket"]["value"] == threaded_daemon.socket
    assert settings_by_key["drain_timeout_s"].keys() == setting("", 0, 0).keys()
    assert main.main([*place, "config"]) == 0
    assert re.search(rf"^socket +{re.escape(threaded_daemon.socket)}", capsys.readouterr().out, re.MULTILINE)
