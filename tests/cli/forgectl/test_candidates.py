"""Candidates for completion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forged.cli.forgectl import candidates, main
from forged.cli.forgectl.parser import Parser
from tests.cli.scripted_daemon import Refusal, say_nothing, scripted_daemon, trickle
from tests.client.fake_daemon import FakeDaemon
from tests.client.threaded_daemon import EventLoopThread

Caught = pytest.CaptureFixture[str]

ANSWERS: dict[str, Any] = {
    "ListJobs": {"jobs": [{"name": "alpha"}, {"name": "beta"}], "more": False},
    "ListTokens": {"tokens": [{"token_id": "0a", "name": "bot"}, {"token_id": "0b", "name": "x", "revoked_at": 1.0}]},
    "ListHandlers": [{"name": "well"}, {"name": "ill", "quarantined": True}],
    "ListPlugins": [
        {"name": "event_log", "state": "active", "commands": [{"name": "rotate", "help": "start a new file"}, "flush"]},
        {"name": "webhook", "state": "disabled", "commands": []},
    ],
    "ListCheckpoints": {"checkpoints": [{"checkpoint_id": "c-1", "step": 7}, {"checkpoint_id": "c-2", "step": 8}]},
}
FACTS = [[1, 0.0, "JobCreated"], [2, 0.0, "NoteAdded"], [3, 0.0, "JobCreated"]]


def words(*typed: str) -> list[str]:
    return [word for word, _ in candidates.candidates(main._parser(), typed)]


class TestWithoutADaemon:
    @pytest.mark.parametrize(
        ("typed", "offered"),
        [
            (["pi"], ["ping"]),
            (
                ["jobs", ""],
                ["ls", "create", "change", "show", "rm", "pause", "resume", "abort", "reopen", "rescale", "watch"],
            ),
            (["jobs", "--json", "c"], ["create", "change"]),
            (["--timeout", "3", "plugins", "e"], ["enable"]),
            (["--timeout=3", "plugins", "e"], ["enable"]),
            (["--", "plugins", "e"], ["enable"]),
            (["config", ""], ["show", "reload"]),
            (["completion", ""], ["bash", "zsh", "fish"]),
            (["tokens", "create", "x", "--ro"], ["--role"]),
            (["tokens", "create", "x", "--role", "o"], ["operator"]),
            (["tokens", "create", "x", "--role=o"], ["--role=operator"]),
            (["tokens", "create", ""], []),
            (["--version"], ["--version"]),
            (["events", "-"], ["--help", "--socket", "--endpoint", "--token", "--timeout", "--json", "--follow",
                               "--since", "--job", "--type"]),
            (["events", "--since", ""], []),
            (["ping", ""], []),
            (["jobs", "nonsense", ""], []),
            (["nonsense", ""], []),
            (["--nonsense=1", "pi"], ["ping"]),
            (["--json=1", "pi"], ["ping"]),
            (["jobs", "create", "a", "lr=1", "fa"], []),
        ],
    )  # fmt: skip
    def test_candidates_follow_the_argument_parser(self, typed: list[str], offered: list[str]) -> None:
        assert words(*typed) == offered

    def test_every_command_is_a_candidate(self) -> None:
        assert words() == words("") == [name for name, _, _ in main._COMMANDS]

    def test_commands_and_options_have_help_texts(self) -> None:
        assert dict(candidates.candidates(main._parser(), ["story"])) == {
            "story": "show the causes and consequences of a fact"
        }

    def test_file_names_are_completed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "inner").mkdir()
        (tmp_path / "inner" / "file").touch()
        (tmp_path / ".hidden").touch()
        (tmp_path / "line\nbreak").touch()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert words("backup", "") == ["inner/"]
        assert words("backup", "inner/f") == ["inner/file"]
        assert words("backup", "~/i") == ["~/inner/"]
        assert words("--socket", f"{tmp_path}/i") == [f"{tmp_path}/inner/"]
        assert words(f"--socket={tmp_path}/i") == [f"--socket={tmp_path}/inner/"]
        assert words("backup", ".h") == [".hidden"]
        assert words("backup", "none/") == []


class TestWithADaemon:
    @pytest.mark.parametrize(
        ("typed", "offered"),
        [
            (["jobs", "show", ""], ["alpha", "beta"]),
            (["jobs", "rm", "b"], ["beta"]),
            (["jobs", "remove", "b"], ["beta"]),
            (["jobs", "change", "a"], ["alpha"]),
            (["note", ""], ["alpha", "beta"]),
            (["note", "alpha", ""], []),
            (["events", "--job", ""], ["alpha", "beta"]),
            (["events", "--job=al"], ["--job=alpha"]),
            (["events", "--type", ""], ["JobCreated", "NoteAdded"]),
            (["tokens", "revoke", ""], ["0a"]),
            (["handlers", "readmit", ""], ["ill"]),
            (["plugins", "enable", ""], ["event_log", "webhook"]),
            (["plugins", "run", "event_log", ""], ["rotate", "flush"]),
            (["plugins", "run", "webhook", ""], []),
            (["plugins", "run", "nobody", ""], []),
            (["ckpt", "pin", "--job", "alpha", ""], ["latest", "c-1", "c-2"]),
            (["ckpt", "show", "--job", "alpha", "c-2"], ["c-2"]),
            (["ckpt", "rm", "--job=alpha", "@"], ["@7", "@8"]),
            (["ckpt", "pin", "--job", "a"], ["alpha"]),
        ],
    )
    def test_values_come_from_the_daemon(self, tmp_path: Path, typed: list[str], offered: list[str]) -> None:
        with scripted_daemon(tmp_path, ANSWERS, facts=FACTS) as daemon:
            assert words("--socket", str(daemon.path), *typed) == offered

    def test_long_lists_are_requested_from_the_typed_prefix(self, tmp_path: Path) -> None:
        with scripted_daemon(tmp_path, ANSWERS) as daemon:
            words("--socket", str(daemon.path), "jobs", "show", "train-1")
            assert daemon.requests == [("ListJobs", {"after": "train-"})]

    @pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\x1b[2J", "", None, 7, {}])
    def test_invalid_name_has_no_candidates(self, tmp_path: Path, name: Any) -> None:
        with scripted_daemon(tmp_path, {"ListPlugins": [{"name": name}, {"name": "alpha"}, {}]}) as daemon:
            assert words("--socket", str(daemon.path), "plugins", "show", "a") == ["alpha"]

    @pytest.mark.parametrize("answer", [Refusal("refused", "forbidden"), 7, {}, {"plugins": 7}, None])
    def test_invalid_reply_has_no_candidates(self, tmp_path: Path, answer: Any) -> None:
        with scripted_daemon(tmp_path, {"ListPlugins": answer}) as daemon:
            assert words("--socket", str(daemon.path), "plugins", "show", "") == []

    @pytest.mark.parametrize("treat", [say_nothing, trickle])
    def test_hanging_daemon_is_not_awaited(self, tmp_path: Path, treat: Any, capfd: Caught) -> None:
        loop = EventLoopThread()
        fake = FakeDaemon(tmp_path / "s", treat)
        loop.call(fake.__aenter__)
        assert words("--timeout", "3600", "--socket", str(tmp_path / "s"), "jobs", "show", "") == []
        assert fake.connections == 1
        loop.call(fake.__aexit__)
        loop.end()
        assert capfd.readouterr() == ("", "")


def test_hidden_command_prints_candidates_with_help(capsys: Caught) -> None:
    assert main.main(["complete", "--", "plugins", "ena"]) == 0
    assert main.main(["complete", "plugins", "ena"]) == 0
    assert capsys.readouterr().out == "enable\tenable a plugin, also after a quarantine\n" * 2


def test_hidden_command_is_not_in_the_help() -> None:
    assert "complete" not in words("")
    assert "    complete " not in main._parser().format_help()


def test_parser_of_a_command_is_built_only_when_used() -> None:
    taken: list[Parser] = []
    parser = Parser(prog="x")
    parser.fill = taken.append
    assert not taken
    candidates.candidates(parser, ["y"])
    parser.parse_known_args([])
    assert taken == [parser]
