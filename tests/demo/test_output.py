from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout

import pytest

from forged.demo import output as output_module
from forged.demo.output import Output
from forged.elastic.messages import RescaleCompleted, WorkerFailed
from forged.elastic.model import RescaleType, TopologyDelta
from forged.kernel.messages import Fact, Gap, Record

FAILED = WorkerFailed("w1", 0, "its process was killed by SIGKILL")
COMPLETED = RescaleCompleted(
    2,
    RescaleType.SCALE_DOWN,
    TopologyDelta(1, 2, 0.0, ((1, 2),)),
    100,
    0,
    0.05,
    240,
    [],
    ["w1"],
    "w1 failed",
    0.01,
)


def recorded(fact: Fact, fact_id: int = 7) -> Record:
    return Record.of(fact, fact_id=fact_id, at=0.0, job="spirals")


class Terminal(io.StringIO):
    """Text that is written to a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(show: Callable[[Output], None]) -> str:
    """What is written to a terminal."""
    with redirect_stdout(Terminal()) as terminal:
        show(Output())
    return terminal.getvalue()


@pytest.fixture
def colourful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Surroundings with a terminal of 70 columns that knows colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "70")


def test_a_fact_is_a_sentence_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Output().fact(recorded(FAILED))
    output_log = capsys.readouterr().out
    assert output_log.endswith(" s  #7    w1 failed (rank 0): its process was killed by SIGKILL\n")


def test_reason_of_an_earlier_fact_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    Output().fact(recorded(COMPLETED))
    output_log = capsys.readouterr().out
    assert "2 workers (removed w1), training resumes after step 100" in output_log
    assert "w1 failed" not in output_log


def test_fact_without_a_sentence_is_printed_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    Output().fact(Record.read(recorded(FAILED).data.replace(b"WorkerFailed", b"WorkerSlowly")))
    assert "#7    WorkerSlowly worker_id=w1 rank=0" in capsys.readouterr().out


def test_gap_of_facts_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    Output().fact(Gap(3, 9, "the journal has moved on"))
    assert "facts 3 to 9 missing: the journal has moved on" in capsys.readouterr().out


def test_of_a_flood_the_beginning_is_shown_and_the_rest_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "FLOOD_GAP_S", float("inf"))
    output = Output(run_shown=2)
    for fact_id in range(1, 1004):
        output.fact(recorded(FAILED, fact_id))
    output.note("done")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2:] == [f"{'':14}... and 1,001 more WorkerFailed", "   > done"]


def test_checks_are_remembered_with_whether_they_held(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.check("the sky is blue", held=True)
    output.check("the sky is green", held=False)
    assert output.checks == [("the sky is blue", True), ("the sky is green", False)]
    assert capsys.readouterr().out == "   ok    the sky is blue\n   FAIL  the sky is green\n"


def test_with_quiet_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(quiet=True)
    output.step("a", "b")
    output.fact(recorded(FAILED))
    output.quote("c\nd")
    output.check("e", held=False)
    output.finish_output("f", held=False)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("colourful")
def test_on_a_terminal_long_lines_go_on_below_the_text() -> None:
    lines = re.sub(r"\x1b\[\d*m", "", on_terminal(lambda output: output.fact(recorded(COMPLETED)))).splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 70 for line in lines)
    assert all(line.startswith(" " * 14) for line in lines[1:])


@pytest.mark.usefixtures("colourful")
def test_on_a_terminal_each_line_of_a_quotation_is_marked() -> None:
    lines = re.sub(r"\x1b\[\d*m", "", on_terminal(lambda output: output.quote("word " * 30 + "\nend"))).splitlines()
    assert len(lines) == 4
    assert all(line.startswith("   | ") for line in lines)


@pytest.mark.usefixtures("colourful")
def test_on_a_terminal_there_is_colour() -> None:
    output_log = on_terminal(lambda output: output.check("the sky is blue", held=True))
    assert output_log == "\x1b[32m   ok    \x1b[0mthe sky is blue\n"


@pytest.mark.usefixtures("colourful")
@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_color_and_dumb_terminals_disable_colours(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert "\x1b" not in on_terminal(lambda output: output.check("the sky is blue", held=True))


def test_an_empty_quotation_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Output().quote("")
    assert capsys.readouterr().out == ""
