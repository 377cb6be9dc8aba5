"""`forgectl`: arguments, errors and the commands of main."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forged.auth.model import Role
from forged.cli.forgectl import main
from forged.cli.forgectl.parser import Parser
from forged.client import BlockingClient
from forged.daemon import Daemon
from forged.jobs.model import JobCreated
from forged.kernel.messages import Record
from forged.net.transport.sockets import SystemNetwork
from forged.plain_client.connection import WINDOW_FACTS
from tests.cli.scripted_daemon import say_nothing, trickle
from tests.client.fake_daemon import FakeConnection, FakeDaemon
from tests.client.threaded_daemon import ThreadedDaemon
from tests.net.recording_connections import Certificates

STATUS_KEYS = {
    "version",
    "pid",
    "uptime_s",
    "listen",
    "http",
    "socket",
    "data_dir",
    "jobs",
    "workers",
    "checkpoints",
    "plugins",
}
HUNG_TIMEOUT_S = "0.05"

Ctl = Callable[..., tuple[int, str, str]]
Treat = Callable[[FakeConnection], Awaitable[None]]


@pytest.fixture
def ctl(threaded_daemon: ThreadedDaemon, capsys: pytest.CaptureFixture[str]) -> Ctl:
    """Runs a command line; returns its exit code, output and errors."""

    def run(line: str, place: str | None = None) -> tuple[int, str, str]:
        code = main.main(shlex.split(f"{place or f'--socket {threaded_daemon.socket}'} {line}"))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def json_of(ctl: Ctl, line: str) -> Any:
    """The JSON output of a command."""
    code, out, err = ctl(f"{line} --json")
    assert (code, err) == (0, "")
    return json.loads(out)


class TestArguments:
    @pytest.mark.parametrize(
        "line",
        [
            "",
            "nonsense",
            "story",
            "story three",
            "events --since yesterday",
            "events --since -5",
            "events --since 1_0",
            "--socket /x ping --endpoint tcp://h:1",
            "ping --timeout 0",
            "tokens create bot --role viewer --ttl nan",
            "jobs change a",
            "--timeout 0 ping",
            "--timeout nan ping",
            "--timeout soon ping",
            "--socket /x --endpoint tcp://h:1 ping",
            "tokens create bot",
            "tokens create bot --role king",
            "note a",
            "events --fol",
            "story 99999999999999999999",
            "story -1",
            "jobs change a x=1 --version 0",
            "jobs change a x=1 --version 99999999999999999999",
            "jobs create a x=1 --bogus",
            "ping twice",
            "plugins show",
            "plugins run a",
            "config nonsense",
            "completion csh",
        ],
    )
    def test_wrong_usage_exits_with_2(self, line: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as left:
            main.main(shlex.split(line))
        assert left.value.code == 2
        assert "usage: forgectl" in capsys.readouterr().err

    @pytest.mark.parametrize("endpoint", ["gopher://x:1", "tcp://host", "tcp://host:port", "tcp://:1", "unix://", "x"])
    def test_invalid_endpoint_exits_with_2(self, ctl: Ctl, endpoint: str) -> None:
        code, out, err = ctl("ping", f"--endpoint {endpoint}")
        assert (code, out) == (2, "")
        assert "unix:///path, tcp://host:port or tls://host:port" in err

    def test_wrong_usage_is_a_json_error(self, ctl: Ctl) -> None:
        code, out, err = ctl("jobs nonsense --json")
        error = json.loads(err)["error"]
        assert (code, out, error["kind"], error["code"]) == (2, "", "config", "usage_wrong")
        assert "'nonsense'" in error["message"]
        assert error["fix"] == "see `forgectl jobs --help`"

    def test_settings_may_precede_and_follow_options(self, ctl: Ctl) -> None:
        assert json_of(ctl, "jobs create a x=1 --timeout 5 y=2")["settings"] == {"x": 1, "y": 2}
        assert json_of(ctl, "jobs create b --timeout 5 y=2")["settings"] == {"y": 2}
        assert json_of(ctl, "jobs change b --version 1 y=3 z=4")["settings"] == {"y": 3, "z": 4}

    def test_setting_given_twice_is_refused(self, ctl: Ctl) -> None:
        code, _, err = ctl("jobs create a x=1 x=2")
        assert code == 2
        assert "x is given twice" in err

    @pytest.mark.parametrize("command", ["jobs", "tokens", "handlers"])
    def test_command_without_a_verb_lists(self, ctl: Ctl, command: str) -> None:
        named = [[one["name"] for one in json_of(ctl, f"{command}{verb}")[command]] for verb in ("", " ls", " list")]
        assert named == [named[0]] * 3

    def test_invalid_setting_exits_with_2(self, ctl: Ctl) -> None:
        code, _, err = ctl("jobs create a lr:0.1")
        assert code == 2
        assert "use KEY=VALUE" in err

    def test_negative_ttl_error_names_the_flag(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main.main(shlex.split("tokens create bot --role viewer --ttl -1"))
        assert "argument --ttl: must be a number of seconds > 0, got '-1'" in capsys.readouterr().err

    def test_help_shows_the_default_timeout(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main.main(["ping", "--help"])
        assert "(default: 10)" in capsys.readouterr().out

    @pytest.mark.parametrize("command", ["ping", "handlers", "jobs ls", "tokens list", "events"])
    def test_daemon_options_may_follow_the_command(
        self, ctl: Ctl, threaded_daemon: ThreadedDaemon, command: str
    ) -> None:
        for line in (f"{command} --socket {threaded_daemon.socket} --timeout 5 --token ''", f"--json {command}"):
            assert ctl(line, " " if "--socket" in line else None)[0] == 0
        assert ctl(f"{command} --token forged_nonsense")[0] == 3
        assert json.loads(ctl(f"--json {command}")[1].splitlines()[0])

    def test_options_before_the_command_apply(self, ctl: Ctl) -> None:
        code, _, err = ctl("--token forged_nonsense jobs ls --json")
        assert code == 3
        assert json.loads(err)["error"]["code"] == "token_unknown"

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("7", 7), ("-7", -7), ("0", 0), ("0.5", 0.5), ("1e-3", 1e-3), (".5", 0.5), ("007", "007"),
            ("1_000", "1_000"), ("+1", "+1"), (" 1", " 1"), ("nan", "nan"), ("inf", "inf"), ("٣", "٣"), ("", ""),
        ],
    )  # fmt: skip
    def test_only_plain_decimal_numbers_are_numbers(self, ctl: Ctl, text: str, value: object) -> None:
        settings = json_of(ctl, f"jobs create a {shlex.quote(f'x={text}')}")["settings"]
        assert (settings["x"], type(settings["x"])) == (value, type(value))

    def test_too_large_number_is_refused_by_key(self, ctl: Ctl) -> None:
        assert ctl("jobs create a lr=1e999")[0] == 3
        code, _, err = ctl(f"jobs create a steps={10**30}")
        assert code == 2
        assert "steps must fit into 64 bits" in err

    def test_tcp_endpoint_of_a_tls_daemon_suggests_the_tls_endpoint(
        self, ctl: Ctl, threaded_daemon: ThreadedDaemon, tmp_path: Path
    ) -> None:
        threaded_daemon.runner.network = SystemNetwork(tls_server=Certificates(tmp_path).server())
        threaded_daemon.call(threaded_daemon.runner.reopen, listen=("tls://127.0.0.1:0",))
        (secure,) = threaded_daemon.runner.daemon.listening
        code, _, err = ctl("ping", f"--endpoint {secure.replace('tls://', 'tcp://')}")
        assert code == 4
        assert f"use {secure}" in err

    def test_socket_is_read_from_the_environment(
        self, ctl: Ctl, threaded_daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORGED_SOCKET", threaded_daemon.socket)
        assert ctl("ping", " ")[0] == 0

    def test_endpoint_is_read_from_the_environment_before_the_socket(
        self, ctl: Ctl, threaded_daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORGED_SOCKET", "/nowhere")
        monkeypatch.setenv("FORGED_ENDPOINT", f"unix://{threaded_daemon.socket}")
        assert ctl("ping", " ")[0] == 0

    def test_token_is_read_from_the_environment(self, ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORGED_TOKEN", "forged_nonsense")
        code, _, err = ctl("ping")
        assert code == 3
        assert "token is unknown" in err

    def test_tcp_endpoint_is_accepted(self, ctl: Ctl, threaded_daemon: ThreadedDaemon) -> None:
        threaded_daemon.call(threaded_daemon.runner.reopen, listen=("tcp://127.0.0.1:0",))
        (endpoint,) = threaded_daemon.runner.daemon.listening
        assert ctl("ping", f"--endpoint {endpoint}")[0] == 0
        assert ctl("ping", f"--endpoint {endpoint.removeprefix('tcp://')}")[0] == 0


def every_command(parser: Parser, name: str = "") -> Iterator[str]:
    """The names of all commands and verbs, without aliases."""
    for action in parser.whole()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for shown in action._choices_actions:
                yield f"{name} {shown.dest}".strip()
                yield from every_command(action.choices[shown.dest], f"{name} {shown.dest}".strip())


class TestDocumentation:
    PAGE = (Path(__file__).parents[3] / "docs" / "forgectl.md").read_text()

    @pytest.mark.parametrize("name", list(every_command(main._parser())))
    def test_every_command_is_documented(self, name: str) -> None:
        assert re.search(rf"^\|.*`forgectl {name}\b", self.PAGE, re.MULTILINE)

    @pytest.mark.parametrize("option", ["socket", "endpoint", "token", "timeout", "json"])
    def test_every_common_option_is_documented(self, option: str) -> None:
        assert re.search(rf"^\| `--{option}\b", self.PAGE, re.MULTILINE)

    def test_help_and_page_list_the_same_exit_codes(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main.main(["--help"])
        exit_codes = re.findall(r"^  (\d+)  ", capsys.readouterr().out, re.MULTILINE)
        assert exit_codes == re.findall(r"^\| (\d+) \|", self.PAGE, re.MULTILINE) == ["0", "1", "2", "3", "4", "130"]


class TestUnknownWords:
    @pytest.mark.parametrize(
        ("line", "said"),
        [
            (
                "data --job J",
                "'J' is no verb of `forgectl data`, which needs one of ls, show, audit; for example"
                " `forgectl data show --job JOB`",
            ),
            ("workers w1", "one of ls, show, drain, evict, stack; for example `forgectl workers show WORKER`"),
            ("tokens 1", "one of ls, create, revoke; for example `forgectl tokens ls`"),
            ("jbos ls", "'jbos' is no command of `forgectl`, which needs one of ping, status, handlers,"),
        ],
    )
    def test_error_lists_the_known_words_with_an_example(
        self, line: str, said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as exited:
            main.main(line.split())
        assert (exited.value.code, said in capsys.readouterr().err) == (2, True)


class TestExitCodes:
    def test_refused_request_exits_with_3(self, ctl: Ctl) -> None:
        code, out, err = ctl("note nobody hello")
        assert (code, out) == (3, "")
        assert err.startswith("forgectl: there is no job 'nobody'")

    def test_missing_daemon_exits_with_4_and_says_how_to_start_one(self, ctl: Ctl, tmp_path: Path) -> None:
        code, out, err = ctl("status", f"--socket {tmp_path}/none")
        assert (code, out) == (4, "")
        assert "No such file" in err
        assert "start one with `forged run`" in err

    @pytest.mark.parametrize("line", ["status", "events", "events --follow"])
    def test_hanging_daemon_exits_with_4_after_the_timeout(self, ctl: Ctl, tmp_path: Path, line: str) -> None:
        with listening(tmp_path / "hung") as path:
            code, out, err = ctl(line, f"--timeout {HUNG_TIMEOUT_S} --socket {path}")
        assert (code, out) == (4, "")
        assert f"did not answer within {HUNG_TIMEOUT_S} s" in err

    @pytest.mark.parametrize("greet", [True, False])
    @pytest.mark.parametrize("treat", [say_nothing, trickle])
    @pytest.mark.parametrize("line", ["status", "jobs", "events", "backup file", "plugins"])
    def test_incomplete_reply_exits_with_4_after_the_timeout(
        self, ctl: Ctl, threaded_daemon: ThreadedDaemon, tmp_path: Path, line: str, treat: Treat, *, greet: bool
    ) -> None:
        async def receive(connection: FakeConnection) -> None:
            if greet:
                await connection.accept_hello()
            await treat(connection)

        with faking(threaded_daemon, tmp_path / "slow", receive) as endpoint:
            code, out, err = ctl(line, f"--timeout {HUNG_TIMEOUT_S} --endpoint {endpoint}")
        assert (code, out) == (4, "")
        assert f"did not answer within {HUNG_TIMEOUT_S} s" in err

    def test_web_server_without_a_reply_is_not_awaited(self, ctl: Ctl) -> None:
        with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
            serving = threading.Thread(target=server.serve_forever)
            serving.start()
            endpoint = f"tcp://127.0.0.1:{server.server_port}"
            code, out, err = ctl("status", f"--timeout {HUNG_TIMEOUT_S} --endpoint {endpoint}")
            server.shutdown()
            serving.join()
        assert out == ""
        # The server reads until a line ends, and the binary hello may or may not contain a line end.
        named = {4: "check that a daemon listens there", 1: "it speaks HTTP"}
        assert named[code] in err

    def test_http_reply_exits_with_1_and_names_http(
        self, ctl: Ctl, threaded_daemon: ThreadedDaemon, tmp_path: Path
    ) -> None:
        async def answer(connection: FakeConnection) -> None:
            connection.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await connection.wait_closed()

        with faking(threaded_daemon, tmp_path / "web", answer) as endpoint:
            code, out, err = ctl("status", f"--endpoint {endpoint}")
        assert (code, out) == (1, "")
        assert "is not a forged daemon: it speaks HTTP" in err


class TestJson:
    def test_json_status_has_the_documented_fields(self, ctl: Ctl, threaded_daemon: ThreadedDaemon) -> None:
        status = json_of(ctl, "status")
        assert status.keys() >= STATUS_KEYS
        assert status["socket"] == threaded_daemon.socket
        assert isinstance(status["uptime_s"], float)

    def test_every_command_prints_one_json_object(self, ctl: Ctl, client: BlockingClient) -> None:
        assert json_of(ctl, "ping")["seconds"] > 0
        assert json_of(ctl, "jobs create a lr=0.1 steps=7 fast=true slow=False name=x none=none")["settings"] == {
            "lr": 0.1, "steps": 7, "fast": True, "slow": False, "name": "x", "none": None,
        }  # fmt: skip
        assert json_of(ctl, "note a hello") == {}
        assert [job["name"] for job in json_of(ctl, "jobs ls")["jobs"]] == ["a"]
        assert json_of(ctl, "jobs show a") == json_of(ctl, "jobs list")["jobs"][0]
        assert {handler["name"] for handler in json_of(ctl, "handlers")["handlers"]} >= {"jobs", "auth", "status"}
        (story,) = json_of(ctl, f"story {client.status().last_fact}")["story"]
        assert story["type"] == "NoteAdded"
        assert json_of(ctl, "jobs rm a") == {}
        assert json_of(ctl, "jobs ls") == {"jobs": []}

    def test_lists_larger_than_a_frame_are_complete(self, ctl: Ctl, client: BlockingClient) -> None:
        names = [f"j{number:02}" for number in range(80)]
        for name in names:
            client.create_job(name, {"blob": "x" * 60_000})
        assert [job["name"] for job in json_of(ctl, "jobs ls")["jobs"]] == names

    def test_tokens_are_listed_oldest_first(self, ctl: Ctl, client: BlockingClient) -> None:
        names = [f"bot-{number}" for number in range(9)]
        for name in names:
            client.create_token(name, Role.VIEWER)
        assert [token["name"] for token in json_of(ctl, "tokens ls")["tokens"]] == names

    def test_events_are_one_json_object_per_line(self, ctl: Ctl, client: BlockingClient) -> None:
        client.create_job("a", {"lr": 0.1})
        code, out, _ = ctl("events --json")
        started, created = map(json.loads, out.splitlines())
        assert code == 0
        assert started["type"] == "DaemonStarted"
        assert created | {"at": 0, "origin": ""} == {
            "id": started["id"] + 1, "at": 0, "type": "JobCreated", "job": "a", "generation": 0, "cause": 0,
            "origin": "", "fact": {"name": "a", "settings": {"lr": 0.1}},
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("line", "code", "kind", "what"),
        [
            ("story 999", 3, "refused", "fact_unknown"),
            ("jobs create a x", 2, "config", "setting_invalid"),
            ("backup /none/file", 3, "refused", "backup_impossible"),
            ("ping --socket /none", 4, "unavailable", "no_daemon"),
        ],
    )
    def test_an_error_is_one_object_on_stderr(self, ctl: Ctl, line: str, code: int, kind: str, what: str) -> None:
        left, out, err = ctl(f"{line} --json")
        error = json.loads(err)["error"]
        assert (left, out, error["kind"], error["code"]) == (code, "", kind, what)
        assert error.keys() == {"kind", "code", "message", "fix"}
        assert error["message"]


class TestChangingJobs:
    def test_change_keeps_unnamed_settings(self, ctl: Ctl) -> None:
        json_of(ctl, "jobs create a nodes=4 lr=0.1 note=")
        changed = json_of(ctl, "jobs change a nodes=8 more=none")
        assert changed["version"] == 2
        assert changed["settings"] == {"nodes": 8, "lr": 0.1, "note": "", "more": None}

    def test_empty_value_removes_the_setting(self, ctl: Ctl) -> None:
        json_of(ctl, "jobs create a nodes=4 lr=0.1")
        assert json_of(ctl, "jobs change a lr= never=")["settings"] == {"nodes": 4}

    def test_changed_job_reports_created_with(self, ctl: Ctl) -> None:
        assert "created_with" not in ctl("jobs create a nodes=4")[1]
        assert "created_with" in ctl("jobs change a nodes=8")[1]
        assert json_of(ctl, "jobs create a nodes=4")["settings"] == {"nodes": 8}, (
            "the existing job is returned with its current settings"
        )

    def test_change_of_another_version_is_refused(self, ctl: Ctl) -> None:
        json_of(ctl, "jobs create a nodes=4")
        assert json_of(ctl, "jobs change a nodes=8 --version 1")["version"] == 2
        code, _, err = ctl("jobs change a nodes=9 --version 1")
        assert code == 3
        assert "is at version 2, not 1" in err

    def test_remove_is_rm(self, ctl: Ctl) -> None:
        json_of(ctl, "jobs create a")
        assert ctl("jobs remove a")[1] == "removed job a\n"


class TestHandlers:
    def test_quarantined_handler_is_reenabled(self, ctl: Ctl, threaded_daemon: ThreadedDaemon) -> None:
        def break_down(record: Record) -> None:
            raise ValueError

        def extend(daemon: Daemon) -> None:
            daemon.bus.on(JobCreated, break_down, name="broken", failures_max=1)

        threaded_daemon.runner.extend = extend
        threaded_daemon.call(threaded_daemon.runner.reopen)
        assert ctl("handlers readmit broken")[0] == 3
        json_of(ctl, "jobs create a")
        while "HandlerQuarantined" not in ctl("events")[1]:
            pass
        assert ctl("handlers readmit broken")[1] == "re-enabled broken\n"


class TestTokens:
    def test_token_is_created_used_and_revoked(self, ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
        code, text, _ = ctl("tokens create bot --role viewer --job a --job b --ttl 60")
        assert code == 0
        (token,) = json_of(ctl, "tokens ls")["tokens"]
        assert (token["name"], token["role"], token["jobs"]) == ("bot", "viewer", ["a", "b"])
        monkeypatch.setenv("FORGED_TOKEN", text.strip())
        assert ctl("ping")[0] == 0
        assert ctl("tokens ls")[0] == 3
        monkeypatch.delenv("FORGED_TOKEN")
        assert ctl(f"tokens revoke {token['token_id']}")[1] == f"revoked {token['token_id']} (bot)\n"
        code, _, err = ctl("ping", f"--token {text.strip()} --socket {json_of(ctl, 'status')['socket']}")
        assert code == 3
        assert "was revoked" in err

    def test_token_text_is_in_the_creation_reply_and_not_in_the_list(self, ctl: Ctl) -> None:
        created = json_of(ctl, "tokens create bot --role operator")
        assert created["token"].startswith(f"forged_{created['token_id']}_")
        assert created["token"] not in ctl("tokens ls --json")[1]


class TestTextOutput:
    def test_status_prints_a_line_per_field(self, ctl: Ctl) -> None:
        out = ctl("status")[1]
        assert re.search(r"^uptime +\d+(\.\d+)? (ms|s)$", out, re.MULTILINE)
        assert re.search(r"^http +-$", out, re.MULTILINE)

    def test_tables_have_columns(self, ctl: Ctl, client: BlockingClient) -> None:
        client.create_job("alpha", {"lr": 0.1})
        client.create_job("b")
        header, *rows = ctl("jobs ls")[1].splitlines()
        assert [row[header.index("created_by") :].split()[0] for row in rows] == [f"unix:{os.getuid()}"] * 2
        assert rows[0].endswith("{lr=0.1}")

    def test_latencies_have_readable_units(self, ctl: Ctl) -> None:
        ctl("ping")
        (line,) = (line for line in ctl("handlers")[1].splitlines() if "PingDaemon" in line)
        assert re.search(r"\d (µs|ms) ", line)

    def test_empty_lists_print_a_sentence(self, ctl: Ctl) -> None:
        assert ctl("jobs ls")[1] == "no jobs\n"
        assert ctl("tokens ls")[1] == "no tokens\n"

    def test_output_without_a_terminal_has_no_colour(self, ctl: Ctl, client: BlockingClient) -> None:
        client.create_job("a")
        assert not any("\x1b" in ctl(line)[1] for line in ("status", "events", "jobs ls", "handlers", "story 3"))

    def test_control_characters_are_escaped(self, ctl: Ctl, client: BlockingClient) -> None:
        client.create_job("a")
        client.note("a", "red \x1b[31m\nforged: all is well")
        line = ctl("events")[1].splitlines()[-1]
        assert r'text="red \x1b[31m\nforged: all is well"' in line

    def test_story_is_indented_below_its_cause(self, ctl: Ctl, client: BlockingClient) -> None:
        client.create_job("a")
        last = client.status().last_fact
        out = ctl(f"story {last}")[1]
        assert re.match(rf"> +{last}  .* JobCreated +name=a", out)

    def test_story_of_an_unknown_fact_is_refused(self, ctl: Ctl) -> None:
        code, out, err = ctl("story 999")
        assert (code, out) == (3, "")
        assert "the journal has facts" in err


class TestEvents:
    @pytest.fixture(autouse=True)
    def history(self, client: BlockingClient) -> None:
        for job in ("a", "b"):
            client.create_job(job)
            client.note(job, f"about {job}")

    def chosen(self, ctl: Ctl, line: str) -> list[tuple[str, str]]:
        code, out, _ = ctl(f"events --json {line}")
        assert code == 0
        return [(event["type"], event["job"]) for event in map(json.loads, out.splitlines())]

    def test_events_are_listed_oldest_first(self, ctl: Ctl) -> None:
        assert self.chosen(ctl, "")[1:] == [
            ("JobCreated", "a"),
            ("NoteAdded", "a"),
            ("JobCreated", "b"),
            ("NoteAdded", "b"),
        ]

    def test_since_omits_older_events(self, ctl: Ctl, client: BlockingClient) -> None:
        assert self.chosen(ctl, f"--since {client.status().last_fact - 1}") == [("NoteAdded", "b")]
        assert self.chosen(ctl, f"--since {client.status().last_fact}") == []

    def test_events_are_filtered_by_job_and_type(self, ctl: Ctl) -> None:
        assert self.chosen(ctl, "--job b") == [("JobCreated", "b"), ("NoteAdded", "b")]
        assert self.chosen(ctl, "--type NoteAdded --job a --job b") == [("NoteAdded", "a"), ("NoteAdded", "b")]
        assert len(self.chosen(ctl, "--type NoteAdded --type JobCreated")) == 4

    def test_filter_without_matches_prints_nothing(self, ctl: Ctl) -> None:
        assert self.chosen(ctl, "--type NoSuchFact") == []
        assert self.chosen(ctl, "--job none") == []

    def test_history_larger_than_a_frame_is_complete(self, ctl: Ctl, client: BlockingClient) -> None:
        for number in range(WINDOW_FACTS + 100):
            client.note("a", f"{number}")
        assert len(self.chosen(ctl, "--type NoteAdded")) == 2 + WINDOW_FACTS + 100

    def test_trimmed_history_is_reported_as_a_gap(
        self, ctl: Ctl, threaded_daemon: ThreadedDaemon, client: BlockingClient
    ) -> None:
        threaded_daemon.call(threaded_daemon.runner.reopen, journal_facts_max=100)
        for number in range(200):
            client.note("a", f"{number}")
        # The daemon's own facts are kept: the job that has most facts loses its oldest.
        gaps = [
            item["gap"] for item in map(json.loads, ctl("events --since 1 --json")[1].splitlines()) if "gap" in item
        ]
        assert gaps
        printed = ctl("events --since 1")[1]
        assert all(f"\n-- facts {gap['first']} to {gap['last']} " in printed for gap in gaps)


class TestPipes:
    """Real processes connected by pipes."""

    def test_closed_pipe_ends_the_command(self, threaded_daemon: ThreadedDaemon, client: BlockingClient) -> None:
        client.create_job("a")
        for number in range(2000):
            client.note("a", f"{number} {'x' * 100}")
        with running(threaded_daemon, "events") as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.wait() == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""

    def test_unencodable_character_is_shown_as_its_number(self, threaded_daemon: ThreadedDaemon) -> None:
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command(threaded_daemon, "ping"), env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    def test_follow_continues_after_a_daemon_restart(
        self, threaded_daemon: ThreadedDaemon, client: BlockingClient
    ) -> None:
        client.create_job("a")
        start = client.status().last_fact
        with running(threaded_daemon, f"events --follow --json --since {start}") as process:
            heard = []
            for text in ("one", "two", "three"):
                client.note("a", text)
                heard += _read_until(process, text)
                threaded_daemon.call(threaded_daemon.runner.reopen)
            client.note("a", "four")
            heard += _read_until(process, "four")
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130
            assert process.stderr is not None
            remarks = process.stderr.read()
        kept = [item.id for item in client.past_facts(since=start) if isinstance(item, Record)]
        assert [event["id"] for event in heard] == kept
        assert "waiting for the daemon" in remarks
        assert "the daemon is back" in remarks
        assert "Traceback" not in remarks

    def test_follow_starts_with_the_next_event(self, threaded_daemon: ThreadedDaemon, client: BlockingClient) -> None:
        client.create_job("a")
        with running(threaded_daemon, "events --follow --json") as process:
            while not threaded_daemon.call(threaded_daemon.subscriptions):
                client.ping()
            client.note("a", "now")
            (heard,) = _read_until(process, "now")
            process.terminate()
        assert heard["fact"] == {"text": "now"}


def command(threaded_daemon: ThreadedDaemon, line: str) -> list[str]:
    return [sys.executable, "-m", "forged.cli.forgectl.main", "--socket", threaded_daemon.socket, *shlex.split(line)]


@contextmanager
def running(threaded_daemon: ThreadedDaemon, line: str) -> Iterator[subprocess.Popen[str]]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A test run in the background ignores SIGINT, and so would its children.
    with subprocess.Popen(command(threaded_daemon, line), preexec_fn=_restore_interrupts, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def _restore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _read_until(process: subprocess.Popen[str], text: str) -> list[dict[str, Any]]:
    """The events up to the note with that text."""
    assert process.stdout is not None
    events: list[dict[str, Any]] = []
    while not events or events[-1]["fact"].get("text") != text:
        events.append(json.loads(process.stdout.readline()))
    return events


@contextmanager
def listening(path: Path) -> Iterator[Path]:
    """A socket that accepts connections and sends nothing."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield path


@contextmanager
def faking(
    threaded_daemon: ThreadedDaemon, path: Path, treat: Callable[[FakeConnection], Awaitable[None]]
) -> Iterator[str]:
    """A fake daemon with this handler."""
    fake = FakeDaemon(path, treat)
    threaded_daemon.call(fake.__aenter__)
    yield fake.endpoint
    threaded_daemon.call(fake.__aexit__)
