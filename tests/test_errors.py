from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import (
    DESCRIPTION_CHARS_MAX,
    KINDS,
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


def test_an_error_says_what_is_wrong_and_how_to_mend_it() -> None:
    error = RequestRefused("job_unknown", "there is no job a", "create it")
    assert (error.code, error.message, error.fix) == ("job_unknown", "there is no job a", "create it")
    assert str(error) == "there is no job a (create it)"


def test_an_error_without_a_fix_is_its_sentence() -> None:
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
def test_only_what_passes_may_be_tried_again(error: type[ForgedError], retryable: bool) -> None:
    assert error("code", "message").retryable is retryable


def test_a_configuration_error_names_every_problem() -> None:
    problems = [Problem("listen", "x", "an address"), Problem("socket_mode", -1, "0 to 511")]
    error = ConfigError("config_invalid", "it is not valid", "mend these keys", problems)
    assert error.problems == tuple(problems)
    assert str(error) == "it is not valid (mend these keys)\n  listen = 'x': an address\n  socket_mode = -1: 0 to 511"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_comes_over_the_wire_as_what_it_was(kind: str) -> None:
    error = from_wire(kind, "code", "message", "fix")
    assert type(error) is KINDS[kind]
    assert (error.kind, error.code, error.message, error.fix) == (kind, "code", "message", "fix")


def test_lost_leadership_comes_over_the_wire_as_such() -> None:
    assert type(from_wire(NotLeader.kind, "not_leader", "message", "")) is NotLeader


def test_a_kind_that_a_newer_peer_knows_is_a_plain_error() -> None:
    error = from_wire("weather", "storm", "message", "")
    assert type(error) is ForgedError
    assert error.code == "storm"


def test_every_kind_is_its_class_s() -> None:
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
        (Silent(), "Silent, which cannot be shown"),
    ],
)
def test_whatever_was_raised_can_be_described(error: BaseException, text: str) -> None:
    assert describe(error) == text


@given(text=st.text(st.characters(categories=["L", "Cs", "Cc"])))
def test_a_description_can_be_encoded_and_is_bounded(text: str) -> None:
    described = describe(ValueError(text * 1000))
    assert described.encode().decode() == described
    assert len(describe(ValueError("x" * 10_000))) == DESCRIPTION_CHARS_MAX
