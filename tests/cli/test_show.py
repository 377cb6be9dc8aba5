"""How the daemon's answers look to people."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from forged.cli import show

HOUR_S, DAY_S = 3600, 86400


def record(fact_id: int, cause: int = 0, **fact: Any) -> dict[str, Any]:
    return {
        "id": fact_id, "at": 0.0, "type": "NoteAdded", "job": "a", "generation": 0, "cause": cause,
        "origin": "a test", "fact": fact,
    }  # fmt: skip


def be_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


class TestUnits:
    @pytest.mark.parametrize(
        ("seconds", "said"),
        [
            (0.0, "-"),
            (6.4e-05, "64 µs"),
            (0.000999, "999 µs"),
            (0.0123, "12.3 ms"),
            (1.0, "1 s"),
            (59.94, "59.9 s"),
            (60, "1m00s"),
            (192.2, "3m12s"),
            (HOUR_S, "1h00m"),
            (5 * HOUR_S + 3 * 60, "5h03m"),
            (3 * DAY_S + 4 * HOUR_S, "3d04h"),
            (1000 * DAY_S, "1000d00h"),
        ],
    )
    def test_durations_are_said_as_people_say_them(self, seconds: float, said: str) -> None:
        assert show.duration(seconds) == said

    @pytest.mark.parametrize(("seconds", "said"), [(0.0009996, "1 ms"), (0.9996, "1 s"), (59.96, "1m00s")])
    def test_what_rounds_up_to_the_next_unit_is_said_in_it(self, seconds: float, said: str) -> None:
        assert show.duration(seconds) == said

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("p50_s", 6.4e-05, "64 µs"),
            ("expires_at", None, "-"),
            ("jobs", ["a", "b"], "a, b"),
            ("jobs", [], "-"),
            ("settings", {}, "-"),
            ("settings", {"lr": 0.1, "name": "two words", "none": None}, '{lr=0.1 name="two words" none=-}'),
            ("settings", {"empty": ""}, '{empty=""}'),
            ("quarantined", True, "yes"),
            ("quarantined", False, "no"),
            ("facts", 0, "0"),
            ("ratio", 0.5, "0.5"),
        ],
    )
    def test_a_field_is_shown_in_the_unit_of_its_name(self, key: str, value: Any, said: str) -> None:
        assert show.field(key, value) == said

    def test_a_time_is_the_time_here(self) -> None:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", show.field("created_at", 1e9))


class TestLayout:
    def test_pairs_stand_below_each_other(self, capsys: pytest.CaptureFixture[str]) -> None:
        show.pairs({"pid": 7, "uptime_s": 192})
        assert capsys.readouterr().out == "pid     7\nuptime  3m12s\n"

    def test_numbers_stand_to_the_right(self, capsys: pytest.CaptureFixture[str]) -> None:
        show.table([{"name": "a", "handled": 5}, {"name": "long", "handled": 1234}], ("name", "handled"), "none")
        assert capsys.readouterr().out == "name  handled\na           5\nlong     1234\n"

    def test_no_rows_are_said_in_words(self, capsys: pytest.CaptureFixture[str]) -> None:
        show.table([], ("name",), "no jobs")
        assert capsys.readouterr().out == "no jobs\n"

    def test_a_story_is_indented_by_what_caused_what(self, capsys: pytest.CaptureFixture[str]) -> None:
        show.story([record(1), record(2, 1), record(3, 2), record(4, 1)], marked=2)
        lines = capsys.readouterr().out.splitlines()
        assert [line.index("NoteAdded") - lines[0].index("NoteAdded") for line in lines] == [0, 2, 4, 2]
        assert [line[0] for line in lines] == [" ", ">", " ", " "]
        assert lines[1].endswith("(a test, because of 1)")


class TestTerminal:
    def test_control_characters_are_spelled_out(self) -> None:
        assert show.plain("a\x1b[2J\nb\u202e") == r"a\x1b[2J\nb\u202e"

    def test_there_is_colour_on_a_terminal(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        be_a_terminal(monkeypatch)
        show.pairs({"pid": 7})
        assert capsys.readouterr().out == "\x1b[2mpid\x1b[0m  7\n"

    @pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
    def test_there_is_none_for_those_who_do_not_want_it(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        be_a_terminal(monkeypatch)
        monkeypatch.setenv(name, value)
        show.pairs({"pid": 7})
        assert capsys.readouterr().out == "pid  7\n"

    def test_there_is_none_in_a_pipe(self, capsys: pytest.CaptureFixture[str]) -> None:
        show.event({"gap": {"first": 1, "last": 2, "reason": "gone"}})
        assert capsys.readouterr().out == "-- facts 1 to 2 are missing: gone\n"
