from __future__ import annotations

import pytest

from forged.elastic.membership.registry import NAMES_BYTES_MAX, MemberRegistry
from forged.errors import RequestRefused
from tests.elastic.coordinator_playbook import JOB, incarnation, newcomer


def test_a_worker_is_known_by_its_incarnation() -> None:
    roster = MemberRegistry(JOB, [newcomer("a")])
    assert roster.find("a", incarnation("a")) is roster["a"]
    assert roster.find("a", incarnation("a", 2)) is None
    assert roster.find("b", incarnation("b")) is None


def test_worker_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestRefused) as error:
        MemberRegistry(JOB).require("a")
    assert error.value.code == "worker_unknown"


def test_there_is_room_for_so_many_names_and_for_more_when_some_go() -> None:
    roster = MemberRegistry(JOB)

    def crowd() -> None:
        for number in range(NAMES_BYTES_MAX):
            roster.add(newcomer(f"{number:0>120}"))

    with pytest.raises(RequestRefused) as error:
        crowd()
    assert error.value.code == "workers_full"
    there = len(roster)
    assert 1_000 < there < 5_000
    roster.remove(next(iter(roster.values())))
    roster.add(newcomer("short"))
    assert len(roster) == there
