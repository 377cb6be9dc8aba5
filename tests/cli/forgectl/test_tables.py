"""Tables, fields and facts as text."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from forged.cli.forgectl import tables

HOUR_S, DAY_S = 3600, 86400


def record(fact_id: int, cause: int = 0, **fact: Any) -> dict[str, Any]:
    return {
        "id": fact_id, "at": 0.0, "type": "NoteAdded", "job": "a", "generation": 0, "cause": cause,
        "origin": "a test", "fact": fact,
    }  # fmt: skip


def pretend_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


class TestUnits:
    @pytest.mark.parametrize(
        ("count", "said"),
        [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1 kB"),
            (999_499, "999 kB"),
            (999_500, "1 MB"),
            (4_290_000_000, "4.29 GB"),
            (10**12, "1.0 TB"),
            (2 * 10**15, "2,000.0 TB"),
        ],
    )
    def test_sizes_have_readable_units(self, count: int, said: str) -> None:
        assert tables.size(count) == said

    @pytest.mark.parametrize(
        ("number", "said"),
        [
            (0.30000000000000004, "0.3"),
            (0.1, "0.1"),
            (1 / 3, "0.333333333333"),
            (1e-05, "1e-05"),
            (123456789.1, "123456789.1"),
            (2**53, "9007199254740992"),
            (float("inf"), "inf"),
        ],
    )
    def test_numbers_are_shown_without_rounding_noise(self, number: float, said: str) -> None:
        assert tables.field("rate", number) == said

    def test_many_names_are_counted(self) -> None:
        assert tables.names([f"w{number}" for number in range(9)]) == "w0, w1, w2, w3, w4, w5, w6, w7 and 1 more"
        assert tables.names(["a", "\x1b"]) == r"a, \x1b"

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
    def test_durations_have_readable_units(self, seconds: float, said: str) -> None:
        assert tables.duration(seconds) == said

    @pytest.mark.parametrize(("seconds", "said"), [(0.0009996, "1 ms"), (0.9996, "1 s"), (59.96, "1m00s")])
    def test_value_that_rounds_up_uses_the_next_unit(self, seconds: float, said: str) -> None:
        assert tables.duration(seconds) == said

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
            ("secret", b"\x01\xff", "01ff"),
            ("created_at", float("nan"), "nan"),
            ("created_at", 1e300, "1e+300"),
            ("uptime_s", float("inf"), "inf"),
            ("uptime_s", float("nan"), "nan"),
            ("settings", {1: "x"}, "{1=x}"),
        ],
    )
    def test_field_suffix_determines_the_unit(self, key: str, value: Any, said: str) -> None:
        assert tables.field(key, value) == said

    def test_times_are_local(self) -> None:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", tables.field("created_at", 1e9))


class TestLayout:
    def test_pairs_are_printed_one_per_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        tables.pairs({"pid": 7, "uptime_s": 192, "socket": ""})
        assert capsys.readouterr().out == "pid     7\nuptime  3m12s\nsocket  -\n"

    def test_numbers_are_right_aligned(self, capsys: pytest.CaptureFixture[str]) -> None:
        tables.table([{"name": "a", "handled": 5}, {"name": "long", "handled": 1234}], ("name", "handled"), "none")
        assert capsys.readouterr().out == "name  handled\na           5\nlong     1234\n"

    def test_empty_table_prints_a_sentence(self, capsys: pytest.CaptureFixture[str]) -> None:
        tables.table([], ("name",), "no jobs")
        assert capsys.readouterr().out == "no jobs\n"

    def test_story_is_indented_by_cause(self, capsys: pytest.CaptureFixture[str]) -> None:
        tables.story([record(1), record(2, 1), record(3, 2), record(4, 1)], marked=2)
        lines = capsys.readouterr().out.splitlines()
        assert [line.index("NoteAdded") - lines[0].index("NoteAdded") for line in lines] == [0, 2, 4, 2]
        assert [line[0] for line in lines] == [" ", ">", " ", " "]
        assert lines[1].endswith("(a test, caused by 1)")

    def test_missing_fields_are_shown_as_dashes(self, capsys: pytest.CaptureFixture[str]) -> None:
        tables.table([{"name": "a"}, {"handled": 7, "later": 1}], ("name", "handled", "created_at"), "none")
        assert capsys.readouterr().out == "name  handled  created\na           -  -\n-           7  -\n"

    @pytest.mark.parametrize("element", [{}, {"id": 7}, {"gap": 7}, {"gap": {}}, {"fact": 7, "at": "x", "cause": {}}])
    def test_record_with_missing_fields_is_one_line(
        self, capsys: pytest.CaptureFixture[str], element: dict[str, Any]
    ) -> None:
        tables.story([element], marked=7)
        assert capsys.readouterr().out.count("\n") == 1

    def test_deeply_nested_value_is_cut(self) -> None:
        nested: Any = {}
        for _ in range(2000):
            nested = {"in": nested}
        assert tables.field("settings", nested).endswith(f"in={tables.CUT}" + "}" * tables.NESTED_MAX)

    def test_wide_characters_take_two_columns(self, capsys: pytest.CaptureFixture[str]) -> None:
        tables.table([{"a": "日本", "b": 1}, {"a": "e\u0301tat", "b": 2}], ("a", "b"), "none")
        assert capsys.readouterr().out == "a     b\n日本  1\ne\u0301tat  2\n"


class TestTerminal:
    WIDE = ({"name": "webhook", "failed": 5, "state": "quarantined", "reason": "no route to host " * 20},)
    COLUMNS = ("name", "failed", "state", "reason")

    @pytest.mark.parametrize("columns", [200, 80, 60, 45])
    def test_table_fits_the_terminal(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
    ) -> None:
        pretend_terminal(monkeypatch, columns)
        monkeypatch.setenv("NO_COLOR", "1")
        tables.table(self.WIDE, self.COLUMNS, "none")
        _, line = capsys.readouterr().out.splitlines()
        assert len(line) == columns
        assert line.startswith("webhook       5  quarantined  no route")
        assert line.endswith(tables.CUT)

    def test_columns_are_not_cut_below_their_minimum(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pretend_terminal(monkeypatch, 10)
        monkeypatch.setenv("NO_COLOR", "1")
        tables.table(self.WIDE, self.COLUMNS, "none")
        assert capsys.readouterr().out.splitlines()[1] == "webhook       5  quarant…  no rout…"

    @pytest.mark.parametrize(
        ("columns", "line"),
        [
            (50, "webhook-of-the-team1    7  active  10.0.0.1:4000"),
            (45, "webhook-of-the-team1    7  active  10.0.0.1:…"),
            (40, "webhook-of-the-team1    7  active"),
            (30, "webhook-of-the-team1  active"),
            (20, "webhook-of-…  active"),
        ],
    )
    def test_yielding_columns_are_cut_first_and_the_kept_column_last(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, line: str
    ) -> None:
        pretend_terminal(monkeypatch, columns)
        monkeypatch.setenv("NO_COLOR", "1")
        row = {"name": "webhook-of-the-team1", "gen": 7, "state": "active", "address": "10.0.0.1:4000"}
        tables.table([row], tuple(row), "none", yielding=("address", "gen"), kept="name")
        assert capsys.readouterr().out.splitlines()[1] == line

    def test_fact_wraps_between_words(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pretend_terminal(monkeypatch, 60)
        tables.event(record(17, 3, text="no route to host " * 6 + "日本語"))
        painted = capsys.readouterr().out
        first, *others = re.sub(r"\x1b\[\d*m", "", painted).splitlines()
        assert first.endswith("NoteAdded")
        assert all(len(line) <= 60 and line.startswith(" " * tables.HANGING) for line in others)
        assert " ".join(" ".join(others).split()) == f'text="{"no route to host " * 6}日本語" (a test, caused by 3)'

    def test_pair_value_wraps_between_words(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pretend_terminal(monkeypatch, 40)
        monkeypatch.setenv("NO_COLOR", "1")
        tables.pairs({"standing": "1 worker waits for 2 more: min_workers is 3"})
        assert capsys.readouterr().out == "standing  1 worker waits for 2 more:\n          min_workers is 3\n"

    def test_fact_does_not_wrap_in_a_pipe_or_on_a_narrow_terminal(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "40")
        tables.event(record(17, text="no route to host " * 6))
        pretend_terminal(monkeypatch, 20)
        tables.event(record(17, text="no route to host " * 6))
        assert capsys.readouterr().out.count("\n") == 2

    def test_wide_characters_are_cut_by_their_columns(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pretend_terminal(monkeypatch, 10)
        tables.table([{"a": "日本語" * 9}], ("a",), "none")
        assert capsys.readouterr().out.splitlines()[1] == "日本語日…"

    def test_nothing_is_cut_in_a_pipe(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "20")
        tables.table(self.WIDE, self.COLUMNS, "none")
        assert "no route to host " * 19 in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("key", "value", "colour"),
        [
            ("state", "active", "32"),
            ("state", "disabled", "33"),
            ("state", "quarantined", "31"),
            ("state", "refused", "31"),
            ("problem", "disk full", "31"),
            ("quarantined", True, "31"),
        ],
    )
    def test_states_have_colours(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str, value: Any, colour: str
    ) -> None:
        pretend_terminal(monkeypatch)
        tables.table([{key: value, "more": "x"}], (key, "more"), "none")
        cell = tables.field(key, value)
        assert f"\x1b[{colour}m{cell}\x1b[0m" in capsys.readouterr().out.splitlines()[1]

    @pytest.mark.parametrize(
        ("key", "value"), [("state", "news"), ("state", None), ("state", []), ("problem", None), ("quarantined", False)]
    )
    def test_healthy_and_unknown_states_have_no_colour(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str, value: Any
    ) -> None:
        pretend_terminal(monkeypatch)
        tables.table([{key: value}], (key,), "none")
        assert "\x1b" not in capsys.readouterr().out.splitlines()[1]

    def test_terminal_output_has_colour(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pretend_terminal(monkeypatch)
        tables.pairs({"pid": 7})
        assert capsys.readouterr().out == "\x1b[2mpid\x1b[0m  7\n"

    @pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
    def test_no_color_and_dumb_terminals_have_no_colours(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        pretend_terminal(monkeypatch)
        monkeypatch.setenv(name, value)
        tables.pairs({"pid": 7})
        assert capsys.readouterr().out == "pid  7\n"

    def test_pipe_output_has_no_colour(self, capsys: pytest.CaptureFixture[str]) -> None:
        tables.event({"gap": {"first": 1, "last": 2, "reason": "gone"}})
        assert capsys.readouterr().out == "-- facts 1 to 2 missing: gone\n"


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (1_234_567, "1,234,567 files")]
)
def test_counts_have_separators_and_plurals(count: int, said: str) -> None:
    assert tables.counted(count, "file") == said


@pytest.mark.parametrize(("part", "said"), [(0.0, "[----]"), (0.5, "[##--]"), (1.0, "[####]"), (7.0, "[####]")])
def test_bar_is_filled_in_proportion(part: float, said: str) -> None:
    assert tables.bar(part, 4) == said


@pytest.mark.parametrize(
    ("value", "said"), [(None, None), (1.0000000298, 1.0), (1234567.8, 1234570.0), (float("inf"), float("inf"))]
)
def test_numbers_are_rounded_to_readable_digits(value: float | None, said: float | None) -> None:
    assert tables.rounded(value) == said
