from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import RequestRefused
from forged.kernel.bus.model import HandlerFailed
from forged.kernel.messages import Decision, Fact, Record
from forged.plugins.facts import (
    DEPTH_MAX,
    FACT_BYTES_MAX,
    FACTS_MAX,
    REPLY_BYTES_MAX,
    check_decision,
    check_facts,
    check_job_and_generation,
)
from tests.plugins.plugin_fixture import Said


def code(error: pytest.ExceptionInfo[RequestRefused]) -> str:
    return error.value.code


def nested(depth: int) -> list[Any]:
    it: list[Any] = []
    for _ in range(depth):
        it = [it]
    return it


@pytest.mark.parametrize(
    "fact", [Said("x"), Said("", {"a": [1, None, b"raw", 1.5]}), Said("x" * 60_000), Said("x", nested(DEPTH_MAX - 2))]
)
def test_plugin_may_publish_its_own_facts(fact: Fact) -> None:
    check_facts([fact] * FACTS_MAX, own=True)


@pytest.mark.parametrize("fact", [HandlerFailed("x", 1, "y"), Fact()])
def test_plugin_may_not_publish_facts_of_the_daemon(fact: Fact) -> None:
    with pytest.raises(RequestRefused) as caught:
        check_facts([fact], own=True)
    assert code(caught) == "fact_foreign"
    check_facts([fact], own=False)


@pytest.mark.parametrize(
    "fact",
    [
        Said("x", object()),
        Said("x", lambda: 1),
        Said("\ud800"),
        Said(7),  # type: ignore[arg-type]
        Said("x", 1 << 64),
        Said("x", nested(DEPTH_MAX - 1)),
        Said("x", nested(5000)),
    ],
)
def test_fact_that_cannot_be_decoded_again_is_refused(fact: Fact) -> None:
    with pytest.raises(RequestRefused) as caught:
        check_facts([fact], own=True)
    assert code(caught) == "fact_unfit"


@pytest.mark.parametrize("thing", [None, "text", 7, Said, {"text": "x"}, msgspec.Raw(b"")])
def test_invalid_fact_is_refused(thing: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        check_facts([thing], own=True)
    assert code(caught) == "fact_type_invalid"


def test_facts_have_a_size_and_come_in_limited_numbers() -> None:
    with pytest.raises(RequestRefused) as large:
        check_facts([Said("x" * FACT_BYTES_MAX)], own=True)
    with pytest.raises(RequestRefused) as many:
        check_facts([Said("x")] * (FACTS_MAX + 1), own=True)
    assert (code(large), code(many)) == ("fact_too_large", "facts_too_many")


@pytest.mark.parametrize(("job", "number"), [("", 0), ("j", 5), ("größe", 1 << 40)])
def test_a_job_is_a_text_and_a_generation_a_whole_number(job: str, number: int) -> None:
    check_job_and_generation(job, number)


@pytest.mark.parametrize(
    ("job", "number"), [(None, 0), (5, 0), (b"j", 0), ("\ud800", 0), ("j", -1), ("j", 1.0), ("j", True), ("j", None)]
)
def test_invalid_job_or_generation_is_refused(job: object, number: object) -> None:
    with pytest.raises(RequestRefused) as caught:
        check_job_and_generation(job, number)
    assert code(caught) == "fact_unfit"


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (Decision(None, writes={"a/b": b""}), "writes_foreign"),
        (Decision(None, writes={"a/b": None}), "writes_foreign"),
        (Decision(object()), "reply_unfit"),
        (Decision("x" * REPLY_BYTES_MAX), "reply_too_large"),
        (Decision(None, (Said("\ud800"),)), "fact_unfit"),
        (Decision(None, job=None), "fact_unfit"),  # type: ignore[arg-type]
        (Decision(None, generation=None), "fact_unfit"),  # type: ignore[arg-type]
    ],
)
def test_a_decision_that_is_not_a_plugin_s_is_refused(decision: Decision[Any], expected: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check_decision(decision, own=True)
    assert code(caught) == expected


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(text=st.text(st.characters()) | values, more=values, job=st.text(st.characters()) | values, number=values)
def test_accepted_fact_can_be_read_back(text: Any, more: Any, job: Any, number: Any) -> None:
    fact = Said(text, more)
    try:
        check_decision(Decision(None, (fact,), job=job, generation=number), own=True)
    except RequestRefused:
        return
    record = Record.read(Record.of(fact, fact_id=1, at=0.0, job=job, generation=number).data)
    assert isinstance(record.fact, Said)
    assert (record.job, record.generation) == (job, number)
