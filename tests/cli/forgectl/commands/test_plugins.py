"""`forgectl plugins`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forged.cli.forgectl import main
from tests.cli.scripted_daemon import UNKNOWN, Refusal, ScriptedDaemon, scripted_daemon
from tests.client.threaded_daemon import ThreadedDaemon

Caught = pytest.CaptureFixture[str]

EVENT_LOG = {
    "name": "event_log", "version": "1.2", "origin": "/etc/forged/plugins/event_log.py", "state": "active",
    "reason": None, "parts": ["observes every fact", "every 5 s"],
    "commands": [{"name": "rotate", "help": "start a new file", "arguments": ["keep"]}],
    "handled": 41, "failed": 0, "published": 0,
}  # fmt: skip
WEBHOOK = EVENT_LOG | {
    "name": "webhook", "state": "quarantined", "reason": "OSError: no\x1b[2J route", "failed": 5, "commands": []
}  # fmt: skip


@pytest.fixture
def answers() -> dict[str, Any]:
    return {
        "ListPlugins": [EVENT_LOG, WEBHOOK],
        "EnablePlugin": {},
        "DisablePlugin": {},
        "RunPluginCommand": {"file": "events.1", "rotated_at": 0.0},
    }


@pytest.fixture
def daemon(tmp_path: Path, answers: dict[str, Any]) -> Iterator[ScriptedDaemon]:
    with scripted_daemon(tmp_path, answers) as daemon:
        yield daemon


JSON_1000_LEVELS = 1 if sys.version_info < (3, 12) else 0
"""The exit code: since Python 3.12 the JSON encoder recurses as deep as msgpack does."""


class TestList:
    @pytest.mark.parametrize("line", ["plugins", "plugins ls", "plugins list"])
    def test_plugins_are_a_table(self, daemon: ScriptedDaemon, capsys: Caught, line: str) -> None:
        header, first, second = daemon.run(line, capsys)[1].splitlines()
        assert header.split() == ["name", "version", "state", "handled", "failed", "published", "origin", "reason"]
        assert first.split()[:6] == ["event_log", "1.2", "active", "41", "0", "0"]
        assert second.endswith(r"OSError: no\x1b[2J route")

    def test_json_lists_all_fields(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        assert daemon.json("plugins", capsys) == {"plugins": [EVENT_LOG, WEBHOOK]}

    def test_empty_list_prints_no_plugins(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ListPlugins"] = []
        assert daemon.run("plugins", capsys)[1] == "no plugins\n"


class TestShow:
    def test_commands_are_listed_below_the_plugin(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        whole, commands = daemon.run("plugins show event_log", capsys)[1].split("\n\n")
        assert "parts      observes every fact, every 5 s" in whole.splitlines()
        assert [line.split() for line in commands.splitlines()] == [
            ["name", "arguments", "help"],
            ["rotate", "keep", "start", "a", "new", "file"],
        ]

    def test_plugin_without_commands_has_no_command_table(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        assert "\n\n" not in daemon.run("plugins show webhook", capsys)[1]

    def test_commands_may_be_plain_names(self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught) -> None:
        answers["ListPlugins"] = [EVENT_LOG | {"commands": ["rotate", "flush"]}]
        assert daemon.run("plugins show event_log", capsys)[1].endswith("name\nrotate\nflush\n")

    def test_json_contains_only_the_named_plugin(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        assert daemon.json("plugins show webhook", capsys) == WEBHOOK

    def test_unknown_plugin_is_refused(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        code, out, err = daemon.run("plugins show nobody", capsys)
        assert (code, out) == (3, "")
        assert "unknown plugin 'nobody'" in err


class TestSwitch:
    @pytest.mark.parametrize(("verb", "method"), [("enable", "EnablePlugin"), ("disable", "DisablePlugin")])
    def test_enable_and_disable_send_the_plugin_name(
        self, daemon: ScriptedDaemon, capsys: Caught, verb: str, method: str
    ) -> None:
        assert daemon.run(f"plugins {verb} webhook", capsys) == (0, f"{verb}d webhook\n", "")
        assert daemon.requests == [(method, {"plugin": "webhook"})]
        assert daemon.json(f"plugins {verb} webhook", capsys) == {}

    def test_refused_switch_exits_with_3(self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught) -> None:
        answers["EnablePlugin"] = Refusal("refused", "plugin_unknown", "there is no plugin 'x'", "see the list")
        assert daemon.run("plugins enable x", capsys) == (3, "", "forgectl: there is no plugin 'x' (see the list)\n")


class TestRun:
    def test_arguments_are_sent_by_name(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        daemon.run("plugins run event_log rotate keep=3 --json compress=true", capsys)
        arguments = {"keep": 3, "compress": True}
        assert daemon.requests == [
            ("RunPluginCommand", {"plugin": "event_log", "command": "rotate", "arguments": arguments})
        ]

    def test_argument_given_twice_is_refused(self, daemon: ScriptedDaemon, capsys: Caught) -> None:
        code, _, err = daemon.run("plugins run event_log rotate keep=3 keep=4", capsys)
        assert (code, daemon.requests) == (2, [])
        assert "keep is given twice" in err

    @pytest.mark.parametrize(
        ("result", "said"),
        [
            ({"file": "events.1", "waiting_s": 61}, "file     events.1\nwaiting  1m01s\n"),
            ([{"a": 1}, {"b": "x"}], "a  b\n1  -\n-  x\n"),
            (["one", 2], "one\n2\n"),
            ("done", "done\n"),
            (0, "0\n"),
            (False, "no\n"),
            (None, ""),
            ({}, ""),
            ([], ""),
            ({1: "x", b"\1": 2}, "1   x\n01  2\n"),
        ],
    )
    def test_any_reply_is_shown(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, result: Any, said: str
    ) -> None:
        answers["RunPluginCommand"] = result
        assert daemon.run("plugins run event_log rotate", capsys) == (0, said, "")

    @pytest.mark.parametrize(
        ("result", "said"),
        [
            (7, 7),
            ([1, "x"], [1, "x"]),
            (None, None),
            (b"\xff", "ff"),
            ({1: float("nan"), b"\1": []}, {"1": None, "01": []}),
        ],
    )
    def test_json_output_is_one_object_for_any_reply(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, result: Any, said: Any
    ) -> None:
        answers["RunPluginCommand"] = result
        assert daemon.json("plugins run event_log rotate", capsys) == {"result": said}

    @pytest.mark.parametrize(("levels", "code"), [(400, 0), (1000, JSON_1000_LEVELS)])
    def test_deeply_nested_reply_is_cut_in_text_output(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, levels: int, code: int
    ) -> None:
        nested: Any = "deep"
        for _ in range(levels):
            nested = [nested]
        answers["RunPluginCommand"] = nested
        assert daemon.run("plugins run event_log rotate", capsys) == (0, "…\n", "")
        assert daemon.run("plugins run event_log rotate --json", capsys)[0] == code


class TestStatus:
    STATUS = {"version": "0.1.0", "plugins": ["event_log", "webhook"]}  # noqa: RUF012

    def test_status_lists_inactive_plugins(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught
    ) -> None:
        answers["ReadStatus"] = self.STATUS
        lines = daemon.run("status", capsys)[1].splitlines()
        assert lines[-1] == "inactive plugins  webhook (quarantined)"

    @pytest.mark.parametrize(
        "listed",
        [[], [EVENT_LOG], ["event_log"], Refusal("refused", "forbidden"), UNKNOWN],
    )
    def test_status_omits_inactive_plugins_when_there_are_none(
        self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught, listed: Any
    ) -> None:
        answers |= {"ReadStatus": self.STATUS, "ListPlugins": listed}
        code, out, err = daemon.run("status", capsys)
        assert (code, err) == (0, "")
        assert "inactive" not in out

    def test_json_status_is_the_reply(self, daemon: ScriptedDaemon, answers: dict[str, Any], capsys: Caught) -> None:
        answers["ReadStatus"] = self.STATUS
        assert daemon.json("status", capsys) == self.STATUS
        assert daemon.requests == [("ReadStatus", {})]


def test_plugins_of_a_real_daemon_are_shown(threaded_daemon: ThreadedDaemon, capsys: Caught) -> None:
    place = ["--socket", threaded_daemon.socket, "plugins"]
    assert main.main([*place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"plugins": []}
    for line in (["enable", "nobody"], ["disable", "nobody"], ["run", "nobody", "status"]):
        assert main.main([*place, *line]) == 3
        assert "no plugin nobody" in capsys.readouterr().err.replace("'", "")
