"""Exit codes and output errors of the commands as processes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forged.cli.forgectl import main
from forged.cli.process import plain, print_error
from forged.errors import ConfigError, ForgedError, PeerError, Problem, RequestRefused, Unavailable
from forged.plain_client import connection
from tests.cli.scripted_daemon import Refusal, ScriptedDaemon, scripted_daemon

MANY = [[number, 0.0, "NoteAdded", "a", 0, 0, "me", {"text": "x" * 100}] for number in range(1, 2001)]
ANSWERS: dict[str, Any] = {
    "ReadStatus": {"version": "0.1.0", "last_fact": len(MANY)},
    "ListJobs": {"jobs": []},
    "AddNote": {},
    "ShowJob": Refusal("refused", "job_unknown", "there is no job 'a'"),
    "RevokeToken": Refusal("unavailable", "store_full", "the disk is full"),
    "BackUp": Refusal("internal", "handler_broken", "it broke"),
}

Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with scripted_daemon(tmp_path, ANSWERS, facts=MANY) as daemon:
        yield daemon


@pytest.fixture
def shell(daemon: ScriptedDaemon) -> Shell:
    """Runs a line of bash in which `$ctl` asks the daemon; the status of a pipe is that of its first part."""

    def run(line: str) -> subprocess.CompletedProcess[str]:
        program = f'ctl() {{ {shlex.quote(sys.executable)} -m forged.cli.forgectl.main "$@"; }}; {line}'
        environment = os.environ | {"FORGED_SOCKET": str(daemon.path)}
        # Ignored signals stay ignored in children, and a test run in the background ignores SIGINT.
        return subprocess.run(
            ["bash", "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            preexec_fn=restore_signals,
            check=False,
        )

    return run


def restore_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class TestCodes:
    @pytest.mark.parametrize(
        ("line", "code"),
        [
            ("status", 0),
            ("--help", 0),
            ("jobs --help", 0),
            ("--version", 0),
            ("completion bash", 0),
            ("backup file", 1),
            ("nonsense", 2),
            ("jobs create", 2),
            ("jobs create a x", 2),
            ("--endpoint gopher://x status", 2),
            ("jobs show a", 3),
            ("story 7", 3),
            ("tokens revoke a", 4),
            ("--socket /none/socket status", 4),
        ],
    )
    def test_exit_codes_name_the_kind_of_error(self, shell: Shell, line: str, code: int) -> None:
        for done in (shell(f"ctl {line}"), shell(f"ctl {line} --json")):
            assert done.returncode == code
            assert "Traceback" not in done.stderr
            assert bool(done.stderr) == bool(code)

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (ForgedError("x", "x"), 1),
            (PeerError("x", "x"), 1),
            (ConfigError("x", "x"), 2),
            (RequestRefused("x", "x"), 3),
            (Unavailable("x", "x"), 4),
        ],
    )
    def test_each_kind_of_error_has_its_own_exit_code(
        self, error: ForgedError, code: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert print_error("forgectl", error) == code
        assert capsys.readouterr().err == "forgectl: x\n"

    @pytest.mark.parametrize("line", ["events --follow --since 2000", "events --follow --json --since 2000"])
    def test_interrupt_exits_with_130_and_sigterm_kills(self, daemon: ScriptedDaemon, line: str) -> None:
        for name, code in ((signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)):
            with started(daemon, line) as process:
                assert process.stdout is not None
                process.stdout.readline()
                process.send_signal(name)
                _, errors = process.communicate()
            assert (process.returncode, errors) == (code, "")


class TestOutput:
    @pytest.mark.parametrize("line", ["events", "events --json", "events --follow --since 0", "status", "status --json",
                                      "jobs", "--help", "completion bash"])  # fmt: skip
    @pytest.mark.parametrize("reader", ["true", "head -1"])
    def test_closed_pipe_ends_the_command(self, shell: Shell, line: str, reader: str) -> None:
        done = shell(f"ctl {line} | {reader} > /dev/null; exit ${{PIPESTATUS[0]}}")
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("line", ["events", "events --json", "events --follow --since 0", "status", "status --json",
                                      "--help", "--version", "jobs --help", "completion zsh"])  # fmt: skip
    def test_output_to_a_full_disk_fails(self, shell: Shell, line: str) -> None:
        done = shell(f"ctl {line} > /dev/full")
        assert done.returncode == 1
        if "--json" in line:
            assert json.loads(done.stderr)["error"]["code"] == "output_failed"
        else:
            assert done.stderr == "forgectl: cannot write the output: No space left on device\n"

    @pytest.mark.parametrize("line", ["note a hello", "status", "events --follow", "--help", "nonsense"])
    def test_command_with_closed_stdout_does_nothing_and_fails(
        self, shell: Shell, daemon: ScriptedDaemon, line: str
    ) -> None:
        done = shell(f"ctl {line} >&-")
        assert (done.returncode, daemon.requests) == (1, [])
        assert done.stderr == "forgectl: standard output is closed; nothing was done (redirect it to /dev/null)\n"

    @pytest.mark.parametrize(
        ("line", "code"), [("status", 0), ("jobs show a", 3), ("nonsense", 2), ("jobs show a --json", 3)]
    )
    @pytest.mark.parametrize("errors", ["2>&-", "2> /dev/full"])
    def test_closed_stderr_does_not_change_the_exit_code(self, shell: Shell, line: str, code: int, errors: str) -> None:
        done = shell(f"ctl {line} {errors}")
        assert done.returncode == code
        assert bool(done.stdout) == (code == 0)

    def test_stdin_may_be_closed(self, shell: Shell) -> None:
        done = shell("ctl status --json <&-")
        assert json.loads(done.stdout) == ANSWERS["ReadStatus"]
        assert done.returncode == 0

    def test_exit_code_is_set_with_all_streams_closed(self, shell: Shell) -> None:
        assert shell("ctl status <&- >&- 2>&-").returncode == 1

    def test_follow_ends_on_a_closed_output_without_writing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "PING_AFTER_S", 0.05)
        reader, writer = os.pipe()
        with scripted_daemon(tmp_path) as quiet, open(writer, "w") as pipe:  # noqa: PTH123 - not a path
            monkeypatch.setattr(sys, "stdout", pipe)
            os.close(reader)
            assert main.main(["--socket", str(quiet.path), "events", "--follow"]) == 0


class TestErrorOutput:
    def test_control_characters_are_written_as_escapes(self) -> None:
        assert plain("a\x1b[2J\nb\u202e") == r"a\x1b[2J\nb\u202e"

    def test_control_characters_are_escaped(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_error("forgectl", RequestRefused("x", "red \x1b[31m"))
        assert capsys.readouterr().err == "forgectl: red \\x1b[31m\n"

    def test_problems_are_listed_one_per_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        error = ConfigError("x", "all is wrong", problems=[Problem("a", 1, "0"), Problem("b", "\x07", "c")])
        print_error("forgectl", error)
        assert len(capsys.readouterr().err.splitlines()) == 3
        print_error("forgectl", error, json=True)
        assert "all is wrong; " in json.loads(capsys.readouterr().err)["error"]["message"]


def started(daemon: ScriptedDaemon, line: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        daemon.command(line),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_signals,
    )
