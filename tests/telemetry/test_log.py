"""The daemon's log on streams of all kinds."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forged.errors import ConfigError
from forged.log import Log
from forged.telemetry.log import Logs, configure

NOON = 1769860800.1234
PATIENCE_S = 30.0


class Noon:
    """A clock that has stopped."""

    def wall(self) -> float:
        return NOON

    def monotonic(self) -> float:
        return 0.0


def logged(path: Path, format: str = "auto", environment: Mapping[str, str] | None = None) -> tuple[Logs, Path]:  # noqa: A002
    with path.open("w") as stream:
        return configure("debug", format, stream, clock=Noon(), environment=environment or {}), path


def lines_of(logs: Logs, path: Path) -> list[dict[str, Any]]:
    logs.close(PATIENCE_S)
    return [json.loads(line) for line in path.read_text().splitlines()]


def on_a_terminal(environment: Mapping[str, str], format: str = "auto") -> bytes:  # noqa: A002
    """What appears there for one event."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        logs = configure("info", format, stream, clock=Noon(), environment=environment)
        logs.log.info("something", name="two\x1b[31m words")
        logs.close(PATIENCE_S)
        shown = os.read(ours, 4096)
    os.close(ours)
    return shown


def test_json_log_has_one_object_per_line(tmp_path: Path) -> None:
    logs, path = logged(tmp_path / "log")
    logs.log.warning("something", count=3)
    assert lines_of(logs, path) == [
        {"timestamp": "2026-01-31T12:00:00.123Z", "level": "warning", "event": "something", "count": 3}
    ]


def test_bound_fields_are_in_every_line_of_the_bound_log_only(tmp_path: Path) -> None:
    logs, path = logged(tmp_path / "log")
    bound: Log = logs.log.bind(peer="a").bind(client="b")
    bound.debug("one")
    logs.log.error("two")
    one, two = lines_of(logs, path)
    assert (one["peer"], one["client"], one["level"]) == ("a", "b", "debug")
    assert "peer" not in two


def test_field_cannot_replace_level_or_time(tmp_path: Path) -> None:
    logs, path = logged(tmp_path / "log")
    logs.log.bind(timestamp="never").info("something", level="error")
    [line] = lines_of(logs, path)
    assert line["level"] == "info"
    assert line["timestamp"].startswith("2026-01-31T")


def test_level_change_applies_to_bound_logs(tmp_path: Path) -> None:
    logs, path = logged(tmp_path / "log")
    bound = logs.log.bind(peer="a")
    logs.set_level("error")
    bound.warning("unheard")
    assert not bound.hears("warning")
    assert bound.hears("error")
    logs.set_level("debug")
    bound.debug("heard")
    assert [line["event"] for line in lines_of(logs, path)] == ["heard"]


@pytest.mark.parametrize(("level", "format"), [("loud", "auto"), ("INFO", "auto"), ("info", "xml"), ("", "json")])
def test_unknown_level_or_format_is_a_config_error(level: str, format: str) -> None:  # noqa: A002
    with pytest.raises(ConfigError, match="one of"):
        configure(level, format, io.StringIO())


def test_an_unknown_level_at_a_reload_changes_nothing(tmp_path: Path) -> None:
    logs, _ = logged(tmp_path / "log")
    with pytest.raises(ConfigError):
        logs.set_level("loud")
    assert logs.log.hears("debug")
    logs.close(PATIENCE_S)


def test_terminal_log_is_coloured_text() -> None:
    shown = on_a_terminal({"TERM": "xterm"})
    assert b"something" in shown
    assert b"\x1b[32m" in shown
    assert rb"'two\x1b[31m words'" in shown


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}])
def test_no_color_disables_colours(environment: Mapping[str, str]) -> None:
    shown = on_a_terminal(environment)
    assert b"something" in shown
    assert b"\x1b" not in shown


def test_format_setting_overrides_terminal_detection(tmp_path: Path) -> None:
    assert json.loads(on_a_terminal({}, "json"))["event"] == "something"
    logs, path = logged(tmp_path / "log", "pretty", {"TERM": "xterm"})
    logs.log.info("something", count=3)
    logs.close(PATIENCE_S)
    assert path.read_text().split() == ["2026-01-31T12:00:00.123Z", "[info", "]", "something", "count=3"]


@pytest.mark.parametrize(("level", "priority"), [("debug", 7), ("info", 6), ("warning", 4), ("error", 3)])
def test_journald_lines_begin_with_a_priority(tmp_path: Path, level: str, priority: int) -> None:
    path = tmp_path / "log"
    path.touch()
    status = path.stat()
    logs, _ = logged(path, environment={"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"})
    getattr(logs.log, level)("something")
    logs.close(PATIENCE_S)
    text = path.read_text()
    assert text.startswith(f"<{priority}>{{")
    assert json.loads(text[3:])["level"] == level


@pytest.mark.parametrize("journal", ["1:1", "", "nonsense"])
def test_stream_without_journald_has_no_priorities(tmp_path: Path, journal: str) -> None:
    logs, path = logged(tmp_path / "log", environment={"JOURNAL_STREAM": journal})
    logs.log.info("something")
    assert lines_of(logs, path)[0]["event"] == "something"


def test_an_exception_is_shown_with_its_traceback(tmp_path: Path) -> None:
    logs, path = logged(tmp_path / "log")
    try:
        raise ZeroDivisionError("by nothing")
    except ZeroDivisionError as error:
        logs.log.error("something", exc_info=error)
    [line] = lines_of(logs, path)
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ZeroDivisionError: by nothing")


class NoTime(Noon):
    """A clock that cannot be read as a date."""

    def wall(self) -> float:
        return 1e300


def test_event_that_cannot_be_rendered_is_counted_and_does_not_raise() -> None:
    logs = configure("info", "json", io.StringIO(), clock=NoTime(), environment={})
    logs.log.info("something")
    assert logs.lost == 1
    logs.close(PATIENCE_S)


def test_closed_stream_does_not_raise(tmp_path: Path) -> None:
    stream = (tmp_path / "log").open("w")
    stream.close()
    logs = configure("info", "auto", stream, environment={"JOURNAL_STREAM": "1:1"})
    logs.log.info("something")
    logs.close(PATIENCE_S)
    assert logs.lost == 1


def test_lost_lines_are_reported_in_the_log_format(tmp_path: Path) -> None:
    logs, path = logged(tmp_path / "log")
    logs._outlet.writer.lose("there was no room")
    logs.log.info("something")
    lines = lines_of(logs, path)
    told = next(line for line in lines if line["event"] == "log lines lost")
    assert (told["level"], told["lines"], told["reason"]) == ("warning", 1, "there was no room")


PROGRAM = """
import os, sys, threading
from forged.telemetry.log import configure
logs = configure("info", "json", sys.stderr)
for number in range(30_000):
    logs.log.info("something", number=number)
logs.close(0.2)
print("done", logs.lost > 0, flush=True)
"""


@pytest.mark.parametrize("stderr", ["unread", "full", "closed", "gone"])
def test_process_with_unusable_standard_error_exits_with_0(stderr: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    if stderr == "gone":
        os.close(reading)
    target: Any = writing
    with Path("/dev/full").open("w") as full:
        if stderr == "full":
            target = full
        program = f"import os; os.close(2); import sys; sys.stderr = None\n{PROGRAM}" if stderr == "closed" else PROGRAM
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=target, timeout=60)
    os.close(writing)
    if stderr != "gone":
        os.close(reading)
    assert done.returncode == 0
    assert done.stdout == b"done True\n"


@pytest.mark.parametrize(
    "module", ["forged", "forged.client", "forged.cli.forgectl.main", "forged.daemon", "forged.log"]
)
def test_import_without_logging_does_not_load_the_log(module: str) -> None:
    heavy = "{'structlog', 'aiohttp', 'prometheus_client'}"
    program = f"import sys, {module}; sys.exit(', '.join({heavy} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
