from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import (
    DESCRIPTION_CHARS_MAX,
    KINDS,
    VALUE_CHARS_MAX,
    ConfigError,
    ForgedError,
    NotLeader,
    PeerError,
    Problem,
    RequestRefused,
    Unavailable,
    describe,
    from_wire,
)


def test_error_text_has_problem_and_fix() -> None:
    error = RequestRefused("job_unknown", "there is no job a", "create it")
    assert (error.code, error.message, error.fix) == ("job_unknown", "there is no job a", "create it")
    assert str(error) == "there is no job a (create it)"


def test_error_without_a_fix_is_its_message() -> None:
    assert str(ForgedError("x", "it broke")) == "it broke"


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (ForgedError, False),
        (ConfigError, False),
        (RequestRefused, False),
        (PeerError, False),
        (Unavailable, True),
        (NotLeader, True),
    ],
)
def test_only_temporary_errors_are_retryable(error: type[ForgedError], retryable: bool) -> None:
    assert error("code", "message").retryable is retryable


def test_a_configuration_error_names_every_problem() -> None:
    problems = [Problem("listen", "x", "an address"), Problem("socket_mode", -1, "0 to 511")]
    error = ConfigError("config_invalid", "it is not valid", "mend these keys", problems)
    assert error.problems == tuple(problems)
    assert str(error).splitlines() == [
        "it is not valid (mend these keys)",
        "  listen must be an address, got 'x'",
        "  socket_mode must be 0 to 511, got -1",
    ]


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("drain_timeout_s", "x", "a number", line=12), "line 12: drain_timeout_s must be a number, got 'x'"),
        (
            Problem("listen", "x", "an address", place="the command line"),
            "the command line: listen must be an address, got 'x'",
        ),
        (Problem("a.b", 1, "2", line=3, place="the command line"), "line 3: a.b must be 2, got 1"),
    ],
)
def test_problem_has_a_location(problem: Problem, text: str) -> None:
    assert str(problem) == text


@pytest.mark.parametrize(
    "value",
    [
        "x" * 100_000,
        {"x" * 1000: ["y" * 1000] * 1000},
        10**10_000,
        b"x" * 100_000,
        [str(number) * 100 for number in range(1000)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_problem_with_a_large_value_is_short(value: object) -> None:
    text = str(Problem("key", value, "something small"))
    assert len(text) < 2 * VALUE_CHARS_MAX + 100
    assert text.startswith("key must be something small, got ")


def test_problem_with_a_recursive_value_has_a_text() -> None:
    value: object = 1
    for _ in range(100_000):
        value = {"a": value}
    assert str(Problem("key", value, "a text")).startswith("key must be a text, got {'a': ")


@pytest.mark.parametrize(
    ("key", "text"), [("\x1b[31m", "'\\x1b[31m' must be 2, got 1"), ("a\nb", "'a\\nb' must be 2, got 1")]
)
def test_key_with_control_characters_is_escaped(key: str, text: str) -> None:
    assert str(Problem(key, 1, "2")) == text


def test_long_key_is_cut() -> None:
    assert len(str(Problem("k" * 10_000, 1, "2"))) < VALUE_CHARS_MAX + 100


@pytest.mark.parametrize("kind", KINDS)
def test_error_survives_encoding(kind: str) -> None:
    error = from_wire(kind, "code", "message", "fix")
    assert type(error) is KINDS[kind]
    assert (error.kind, error.code, error.message, error.fix) == (kind, "code", "message", "fix")


def test_lost_leadership_survives_encoding() -> None:
    assert type(from_wire(NotLeader.kind, "not_leader", "message", "")) is NotLeader


def test_unknown_error_kind_becomes_a_plain_error() -> None:
    error = from_wire("weather", "storm", "message", "")
    assert type(error) is ForgedError
    assert error.code == "storm"


def test_each_error_kind_has_one_class() -> None:
    assert {kind: cls.kind for kind, cls in KINDS.items()} == {kind: kind for kind in KINDS}


@pytest.mark.parametrize("error", [Unavailable("code", "message", "fix"), NotLeader("code", "message", "fix")])
def test_an_error_survives_being_sent_to_another_process(error: ForgedError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.code, copy.message, copy.fix) == (type(error), "code", "message", "fix")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (RequestRefused("no", "not like this", "like that"), "not like this (like that)"),
        (SystemExit(1), "SystemExit: 1"),
        (FileNotFoundError("caf\udce9"), "FileNotFoundError: caf\\udce9"),
        (Silent(), "Silent (its text cannot be shown)"),
    ],
)
def test_any_exception_can_be_described(error: BaseException, text: str) -> None:
    assert describe(error) == text


@given(text=st.text(st.characters(categories=["L", "Cs", "Cc"])))
def test_a_description_can_be_encoded_and_is_bounded(text: str) -> None:
    described = describe(ValueError(text * 1000))
    assert described.encode().decode() == described
    assert len(describe(ValueError("x" * 10_000))) == DESCRIPTION_CHARS_MAX
