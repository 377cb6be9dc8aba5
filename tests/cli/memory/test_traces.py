"""`forgectl memory plan` and `replay`, which need no daemon."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from forged.cli.forgectl import main
from forged.cli.process import EXIT_FAILED, EXIT_OK, EXIT_USAGE

# Best fit leaves two holes of 2; `wide` needs 3.
TRACE = "id,lower,upper,size\nlow,0,10,2\ngap,0,2,2\nhigh,0,10,2\nwide,2,10,3\n"
PEAK = 7


class Commands:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file = folder / "trace.csv"
        self.file.write_text(TRACE)
        self._capsys = capsys

    def run(self, line: str) -> tuple[int, str, str]:
        code = main.main(["memory", *shlex.split(line.replace("FILE", str(self.file)))])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def json(self, line: str) -> tuple[int, Any]:
        code, out, err = self.run(f"{line} --json")
        assert err == ""
        return code, json.loads(out)


@pytest.fixture
def commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(tmp_path, capsys)


def test_plan_finds_an_offset_for_each_buffer(commands: Commands) -> None:
    code, reply = commands.json(f"plan FILE --capacity {PEAK}")
    assert (code, reply["fits"], reply["height"], reply["peak"]) == (EXIT_OK, True, PEAK, PEAK)
    assert (reply["format"], reply["buffers"]) == ("lifetimes", 4)
    assert sorted(one["id"] for one in reply["offsets"]) == ["gap", "high", "low", "wide"]
    code, out, _ = commands.run(f"plan FILE --capacity {PEAK}")
    assert code == EXIT_OK
    assert "height    7 bytes (7 B), 1.000 × the peak" in out.splitlines()


def test_plan_says_why_a_trace_does_not_fit(commands: Commands) -> None:
    code, reply = commands.json("plan FILE --capacity 6")
    assert (code, reply["fits"], reply["offsets"]) == (EXIT_FAILED, False, [])
    assert "need 7 bytes at one time; the capacity is 6" in reply["problem"]
    code, out, _ = commands.run("plan FILE --capacity 6")
    assert code == EXIT_FAILED
    assert "fix       use a capacity of at least 7" in out.splitlines()


def test_policies_and_capacities_are_compared(commands: Commands) -> None:
    line = "replay FILE --policy best_fit --policy lru --capacity 8 --capacity 1KiB"
    code, reply = commands.json(line)
    assert code == EXIT_FAILED
    found = [(one["policy"], one["capacity"], one["fits"], one["evicted_bytes"]) for one in reply["replays"]]
    assert found == [
        *(("best_fit", 8, False, 0), ("lru", 8, True, 2)),
        *(("best_fit", 1024, True, 0), ("lru", 1024, True, 0)),
    ]
    code, out, _ = commands.run(line)
    assert (code, len(out.splitlines())) == (EXIT_FAILED, 5)
    assert "buffer 'wide' of 3 bytes has no place at time 2" in out
    assert commands.run("replay FILE")[0] == EXIT_OK


@pytest.mark.parametrize("verb", ["plan", "replay"])
@pytest.mark.parametrize(("suffix", "begin"), [("svg", b"<svg "), ("png", b"\x89PNG")])
def test_packing_is_drawn_in_the_terminal_and_into_a_file(
    commands: Commands, verb: str, suffix: str, begin: bytes
) -> None:
    file = commands.file.with_suffix(f".{suffix}")
    code, out, _ = commands.run(f"{verb} FILE --capacity 9 --picture '{file}'")
    assert code == EXIT_OK
    assert "time 0" in out
    assert file.read_bytes().startswith(begin)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--picture plan.gif", "a name that ends in .png or .svg, got"),
        ("--picture missing/plan.svg", "missing/plan.svg cannot be written: No such file"),
        ("--picture plan.svg --policy lru --policy pool", "a picture shows one replay"),
    ],
)
def test_picture_that_cannot_be_drawn_is_an_error_of_usage(commands: Commands, options: str, error: str) -> None:
    code, out, err = commands.run(f"replay FILE {options}")
    assert (code, out) == (EXIT_USAGE, "")
    assert error in err


@pytest.mark.parametrize("verb", ["plan", "replay"])
def test_file_that_is_no_trace_is_an_error_of_usage(commands: Commands, verb: str) -> None:
    commands.file.write_text("no trace")
    code, out, err = commands.run(f"{verb} FILE")
    assert (code, out) == (EXIT_USAGE, "")
    assert f"{commands.file}, line 1: the columns are unknown" in err
    commands.file.unlink()
    assert commands.run(f"{verb} FILE")[2].startswith(f"forgectl: {commands.file} cannot be read: No such file")


def test_alignment_must_be_a_power_of_two(commands: Commands) -> None:
    code, out, err = commands.run("replay FILE --alignment 3")
    assert (code, out) == (EXIT_USAGE, "")
    assert "alignment must be" in err
