"""What the documentation says is so: its examples run, its links lead somewhere, its tables are those of the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest

from forged.cli import forgectl
from forged.config import Config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.executable).parent
READY_S = 10


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@contextmanager
def a_daemon(directory: Path) -> Iterator[dict[str, str]]:
    """A daemon as the README starts it; yields the environment of its users."""
    socket = str(directory / "forged.sock")
    command = [str(BIN / "forged"), "run", "--data-dir", str(directory / "data"), "--socket", socket]
    command += ["--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        try:
            yield os.environ | {"FORGED_SOCKET": socket, "PATH": f"{BIN}:{os.environ['PATH']}"}
        finally:
            process.terminate()


def test_the_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    [example] = blocks(ROOT / "README.md", "python")
    with a_daemon(tmp_path) as environment:
        done = subprocess.run(
            [sys.executable, "-c", example], env=environment, capture_output=True, text=True, timeout=READY_S
        )
    assert done.returncode == 0, done.stderr
    assert "JobCreated" in done.stdout
    assert "warm-up is over" in done.stdout


def test_the_forgectl_examples_of_the_readme_run(tmp_path: Path) -> None:
    shell = "".join(blocks(ROOT / "README.md", "sh"))
    commands = [line for line in shell.splitlines() if line.startswith("forgectl") and "--follow" not in line]
    assert len(commands) >= 6
    with a_daemon(tmp_path) as environment:
        for command in commands:
            done = subprocess.run(shlex.split(command), env=environment, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_table_of_settings_names_every_setting() -> None:
    named = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert [setting.name for setting in fields(Config)] == [name for name in named if name in Config.__slots__]


@pytest.mark.parametrize("target", ["demo", "test", "check", "bench", "soak"])
def test_make_knows_the_targets_that_are_written_about(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def commands_written_about() -> list[str]:
    """Every `forgectl ...` in the pages, and in the texts of the code that tell people what to do."""
    blocks_of_shell = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    sources = [page.read_text() for page in (*PAGES, *(ROOT / "forged").rglob("*.py"), *ROOT.glob("*/README.md"))]
    quoted = [text for source in sources for text in re.findall(r"`(forgectl [^`\n]+)`", source)]
    return sorted({*quoted, *(line for line in blocks_of_shell if line.startswith("forgectl "))})


def spelt_out(command: str) -> list[str]:
    """The arguments of a command as somebody would type them: optional ones given, names put in."""
    plain = re.sub(r"[\[\]]|\.\.\.", "", command)
    put_in = {"ROLE": "viewer", "role": "viewer", "S": "60", "ID": "7"}
    return [put_in.get(word.strip("{}"), word) for word in shlex.split(re.sub(r"\{[^}]*bound[^}]*\}", "", plain))[1:]]


def test_commands_are_written_about_at_all() -> None:
    assert len(commands_written_about()) >= 10


@pytest.mark.parametrize("command", commands_written_about())
def test_every_command_that_is_written_about_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = spelt_out(command)
    # Where a text names a command without its arguments, it is the command that has to exist.
    try:
        assert forgectl._options(words)
    except SystemExit:
        complaint = capsys.readouterr().err
        assert "the following arguments are required" in complaint, f"{command}: {complaint}"
        assert "COMMAND" not in complaint.splitlines()[-1], f"{command}: {complaint}"
