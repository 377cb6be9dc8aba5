from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.config.lines import DEPTH_MAX, PARSED_CHARS_MAX, invalid_line, key_lines

TRICKY = """\
# comment = "no key"
data_dir = "/a" # socket = 1

listen = [
  "tcp://127.0.0.1:1", # http = "x"
  \"\"\"
socket_mode = 1
[plugins]
\"\"\",
]
http = '''
drain_timeout_s = 5
[tls]
'''
a.b = 1
"quoted # key" = 2
"größe" = 3
text = "x = [" ; closed
"""
TABLES = """\
first = 1
[certificate_roles]
"host.a" = "viewer"
host-b = "worker"

 [ plugins . webhook ]
url = "u"
headers = { a = 1, b = { c = 2 } }
types = [
  "x",
]
nested.deep = 1
[plugins.event_log]
  path = "p"
[[unknown]]
one = 1
[[unknown]]
two = 2
"""


def test_key_line_is_the_first_line_of_its_statement() -> None:
    text = TRICKY.replace(" ; closed", "")
    assert key_lines(text) == {
        "data_dir": 2,
        "listen": 4,
        "http": 11,
        "a": 15,
        "a.b": 15,
        "quoted # key": 16,
        "größe": 17,
        "text": 18,
    }


def test_a_key_of_a_table_has_its_own_line_under_the_path_of_the_table() -> None:
    assert key_lines(TABLES) == {
        "first": 1,
        "certificate_roles": 2,
        "certificate_roles.host.a": 3,
        "certificate_roles.host-b": 4,
        "plugins": 6,
        "plugins.webhook": 6,
        "plugins.webhook.url": 7,
        "plugins.webhook.headers": 8,
        "plugins.webhook.headers.a": 8,
        "plugins.webhook.headers.b": 8,
        "plugins.webhook.headers.b.c": 8,
        "plugins.webhook.types": 9,
        "plugins.webhook.nested": 12,
        "plugins.webhook.nested.deep": 12,
        "plugins.event_log": 13,
        "plugins.event_log.path": 14,
        "unknown": 15,
        "unknown.one": 16,
        "unknown.two": 18,
    }


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_numbers_hold_for_every_kind_of_line_ending(end: str) -> None:
    assert key_lines(TABLES.replace("\n", end)) == key_lines(TABLES)


def test_an_empty_text_has_no_keys() -> None:
    assert key_lines("") == key_lines("\n\n# nothing\n") == {}


def test_the_last_line_needs_no_end() -> None:
    assert key_lines("a = 1\nb = 2") == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRICKY, 18),
        ("a = 1\nb = [\n  1,\nc = 2\n", 2),
        ("a = 1\n\nb = '''\nc = 2\n", 3),
        ("a = 1\n", None),
        ("", None),
        ("[", 1),
    ],
)
def test_incomplete_statement_has_the_line_at_which_it_begins(text: str, line: int | None) -> None:
    assert invalid_line(text) == line


def test_text_over_the_work_limit_has_lines_for_the_keys_before_it() -> None:
    numbers = "1,\n" * 5_000
    text = f"first = 1\nmany = [\n{numbers}]\nlast = 2\n"
    assert tomllib.loads(text)["last"] == 2
    assert len(numbers) ** 2 / 6 > PARSED_CHARS_MAX
    assert key_lines(text) == {"first": 1}


def test_keys_are_found_up_to_a_limited_nesting_depth() -> None:
    text = ".".join(["a"] * 500) + " = 1\n"
    assert len(key_lines(text)) == DEPTH_MAX


def test_nesting_beyond_the_parser_limit_is_incomplete() -> None:
    assert invalid_line("a = 1\nb = " + "[" * 100_000 + "]" * 100_000) == 2


# Any text that TOML can be.

NAMES = st.text("abc", min_size=1, max_size=3)
VALUES = st.sampled_from(
    ["1", '"x"', "'''\na = 1\n[t]\n'''", "[\n 1,\n # b = 2\n 2]", "{ a = 1 }", '"""\\\n  b = 1"""', "1.5", "true"]
)
STATEMENTS = st.tuples(NAMES, VALUES).map(" = ".join)
NOISE = st.sampled_from(["", "# a = 1", "   ", "\t# [x]"])


def flat(table: dict[str, Any], path: str = "") -> set[str]:
    keys = set()
    for key, value in table.items():
        keys.add(path + key)
        if isinstance(value, dict):
            keys |= flat(value, f"{path}{key}.")
    return keys


@given(st.lists(st.one_of(STATEMENTS, NOISE, NAMES.map("[{}]".format)), max_size=12))
def test_every_key_of_a_valid_text_is_found_on_a_line_that_names_it(parts: list[str]) -> None:
    text = ""
    for part in parts:
        try:
            tomllib.loads(f"{text}{part}\n")
        except tomllib.TOMLDecodeError:
            continue
        text += f"{part}\n"
    lines = key_lines(text)
    assert set(lines) == flat(tomllib.loads(text))
    for key, line in lines.items():
        assert key.rpartition(".")[2] in text.split("\n")[line - 1]
