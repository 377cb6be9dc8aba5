"""The command line of `forged launch`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from forged.cli import forged
from forged.cli.process import EXIT_OK, EXIT_USAGE

NOBODY = "tcp://127.0.0.1:1"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FORGED_ENDPOINT", raising=False)
    monkeypatch.delenv("FORGED_JOB", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('trains')\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "0", "train.py"], "-n must be in [1, 1024], got 0"),
        (["-n", "4", "none.py"], "there is no file none.py (use `forged launch [options] script.py`"),
        (["-m", "no.such.module"], "there is no module no.such.module"),
        (["--", "no-such-command"], "there is no command no-such-command"),
        (["-n", "2", "--"], "there is no command after --"),
        (["--nnodes", "2", "train.py"], "2 hosts need one daemon that all of them reach"),
        (["--daemon", "--endpoint", NOBODY, "train.py"], "--endpoint names a daemon, and --daemon runs another"),
        (["--restart", "sometimes", "train.py"], "--restart must be one of never, on-failure, always, got sometimes"),
        (["--restart-job", "x", "train.py"], "--restart-job must be one of never, if-aborted, always, got x"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts must be >= 0, got -1"),
        (["--log-dir", "train.py", "--", "true"], "--log-dir train.py: File exists"),
    ],
)
def test_wrong_usage_is_told(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert forged.main(["launch", *words]) == EXIT_USAGE
    assert said in capsys.readouterr().err


def test_number_must_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        forged.main(["launch", "-n", "many", "train.py"])
    assert raised.value.code == EXIT_USAGE
    assert "-n/--workers: must be an integer, got 'many'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["train.py", "--lr", "3", "--", "-x"], ["--lr", "3", "--", "-x"]),
        (["-n", "2", "train.py", "-n", "3"], ["-n", "3"]),
        (["--", "train", "--", "-x"], ["train", "--", "-x"]),
    ],
)
def test_arguments_of_the_script_reach_it_as_they_are(
    words: list[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []

    def launch(options: argparse.Namespace) -> int:
        found.append(options.arguments)
        return EXIT_OK

    monkeypatch.setattr("forged.cli.service.launch.launch", launch)
    assert forged.main(["launch", *words]) == EXIT_OK
    assert found == [arguments]
