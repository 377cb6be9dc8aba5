from __future__ import annotations

from typing import Any

import pytest

from forged.elastic.config import PULSE_INTERVAL_S, PULSE_INTERVAL_S_MIN, ElasticTrainingConfig
from forged.elastic.membership.member import (
    PULSES_MISSED_MAX,
    Member,
    death_evidence,
    drain_overdue,
    members_holding_up,
    silent_since,
)
from tests.elastic.coordinator_playbook import incarnation, worker_of

CONFIG = ElasticTrainingConfig(worker_heartbeat_timeout_ms=10_000, reconnect_grace_ms=15_000)
AT = 100.0


def member(name: str = "a", /, **more: Any) -> Member:
    found = Member(worker_of(name), incarnation(name), b"client", 0.0)
    found.seen_at = AT
    for field, value in more.items():
        setattr(found, field, value)
    return found


@pytest.mark.parametrize("source", ["seen_at", "heard_at", "pulse_at"])
def test_any_sign_of_life_keeps_it_alive_for_the_timeout(source: str) -> None:
    found = member(**{source: AT + 5})
    assert death_evidence(found, CONFIG, AT + 14.9) is None
    assert death_evidence(found, CONFIG, AT + 15.0) == "no heartbeat and no pulse for 10.0 s"


def test_a_pulse_speaks_for_a_library_that_is_silent() -> None:
    found = member(heard_at=AT, pulse_at=AT + 60)
    assert death_evidence(found, CONFIG, AT + 69) is None


def test_without_a_connection_it_has_its_grace_although_it_is_silent() -> None:
    found = member(lost_at=AT + 9)
    assert death_evidence(found, CONFIG, AT + 23.9) is None
    assert death_evidence(found, CONFIG, AT + 24) == "connection lost 15.0 s ago and not restored"


def test_worker_that_has_lost_the_connection_lives_as_long_as_its_pulse() -> None:
    """A suspended process answers no peer, and a held GIL keeps it from reconnecting."""
    found = member(lost_at=AT, pulse_at=AT + 60)
    assert death_evidence(found, CONFIG, AT + 61) is None
    assert death_evidence(found, CONFIG, AT + 62) == "connection lost 62.0 s ago and not restored"


def test_any_worker_that_is_silent_holds_other_workers_up() -> None:
    silent, late = member("a", collective_seq=2), member("b", collective_seq=1, heard_at=AT + 20)
    waiting = member("c", collective_seq=2, heard_at=AT + 20)
    assert members_holding_up([silent, late, waiting], "abc", CONFIG, AT + 20) == [silent]


def test_members_with_the_lowest_collective_hold_up_the_others() -> None:
    late, waiting, joiner = member("a", collective_seq=1), member("b", collective_seq=2), member("c")
    assert members_holding_up([late, waiting], "ab", CONFIG, AT) == [late]
    assert members_holding_up([late, waiting, joiner], "ab", CONFIG, AT) == [late, joiner]


def stay(found: Member, now: float, *, is_required: bool = True) -> str | None:
    return drain_overdue(found, ElasticTrainingConfig(leave_timeout_ms=60_000), now, is_required=is_required)


def test_required_draining_worker_needs_heartbeats_after_its_timeout() -> None:
    found = member(drain_since=AT + 5, heard_at=AT + 20, pulse_at=AT + 65)
    assert stay(found, AT + 70) is None
    found.drain_reason = "its host is needed"
    assert stay(found, AT + 64.9) is None
    assert stay(found, AT + 79.9) is None, "its library was heard since"
    assert stay(found, AT + 80) == "draining for 75.0 s, and no heartbeat for 60.0 s"
    found.heard_at = AT + 60
    assert stay(found, AT + 80) is None


def test_draining_worker_and_has_lost_its_connection_has_its_grace() -> None:
    found = member(drain_since=AT, heard_at=AT, pulse_at=AT + 100, lost_at=AT + 100)
    found.drain_reason = "its host is needed"
    for is_required in (False, True):
        assert stay(found, AT + 114.9, is_required=is_required) is None
        assert stay(found, AT + 115, is_required=is_required) is not None


def test_dispensable_draining_worker_fails_after_its_timeout() -> None:
    found = member(drain_since=AT + 5, heard_at=AT + 65)
    found.drain_reason = "its host is needed"
    assert stay(found, AT + 64.9, is_required=False) is None
    assert stay(found, AT + 65, is_required=False) == "draining for 60.0 s and has not left"


def test_drain_deadline_counts_from_the_start_of_this_daemon() -> None:
    found = member(seen_at=AT + 30, pulse_at=AT + 90)
    found.drain_reason = "its host is needed"
    assert stay(found, AT + 89) is None
    assert stay(found, AT + 90) is not None


def test_where_drains_have_no_end_no_worker_overstays() -> None:
    found = member()
    found.drain_reason = "its host is needed"
    assert drain_overdue(found, ElasticTrainingConfig(leave_timeout_ms=None), AT + 1e9, is_required=False) is None


def test_a_grace_of_nothing_is_over_at_once() -> None:
    assert death_evidence(member(lost_at=AT), ElasticTrainingConfig(reconnect_grace_ms=0), AT) is not None


def test_a_pulse_counts_as_long_as_few_of_its_words_are_missing() -> None:
    assert not member().has_pulse(AT)
    found = member(pulse_at=AT)
    assert found.has_pulse(AT + PULSES_MISSED_MAX * PULSE_INTERVAL_S - 0.01)
    assert not found.has_pulse(AT + PULSES_MISSED_MAX * PULSE_INTERVAL_S)


def test_only_a_higher_step_or_collective_is_progress() -> None:
    found = member()
    assert found.record_progress(AT + 1, step=5, collective_seq=50)
    assert not found.record_progress(AT + 2, step=5, collective_seq=50)
    assert not found.record_progress(AT + 3, step=4, collective_seq=50)
    assert (found.step, found.collective_seq, found.progress_at) == (5, 50, AT + 1)
    assert found.record_progress(AT + 4, step=5, collective_seq=51)
    assert found.record_progress(AT + 5, step=6, collective_seq=0)
    assert (found.step, found.collective_seq, found.progress_at) == (6, 51, AT + 5)


def test_extended_deadlines_shift_all_times_of_a_member() -> None:
    found = member(heard_at=AT + 1, pulse_at=AT + 2, progress_at=AT, lost_at=AT + 3)
    found.extend_deadlines(20.0, AT + 23)
    assert (found.seen_at, found.heard_at, found.pulse_at) == (AT + 20, AT + 21, AT + 22)
    assert (found.progress_at, found.lost_at) == (AT + 20, AT + 23)


def test_nothing_is_forgiven_in_advance() -> None:
    found = member(heard_at=AT + 19)
    found.extend_deadlines(20.0, AT + 20)
    assert (found.heard_at, found.pulse_at, found.lost_at) == (AT + 20, None, None)


def test_silence_is_detected_earlier_with_a_short_rescale_silence() -> None:
    config = ElasticTrainingConfig(worker_heartbeat_timeout_ms=8_000, rescale_silence_ms=5_000)
    assert AT - silent_since(config, AT) == 4.0
    patient = ElasticTrainingConfig(worker_heartbeat_timeout_ms=8_000, rescale_silence_ms=60_000)
    assert AT - silent_since(patient, AT) == pytest.approx(16 / 3)
    hasty = ElasticTrainingConfig(worker_heartbeat_timeout_ms=8_000, rescale_silence_ms=1_000)
    assert AT - silent_since(hasty, AT) > hasty.heartbeat_interval_s, "one heartbeat may always be on its way"


HASTY = ElasticTrainingConfig(worker_heartbeat_timeout_ms=400, reconnect_grace_ms=15_000)
"""What a job may be changed to."""


class TestOtherSettings:
    """A worker has yet to hear of them."""

    def test_shorter_timeout_does_not_apply_before_the_next_heartbeat(self) -> None:
        found = member(heard_at=AT)
        found.allow_for_settings_change(CONFIG, HASTY)
        assert death_evidence(found, HASTY, AT + 9.9) is None
        assert death_evidence(found, HASTY, AT + 10) == "no heartbeat and no pulse for 10.0 s"

    def test_shorter_timeout_does_not_apply_to_heartbeats_at_the_old_interval(self) -> None:
        found = member()
        found.allow_for_settings_change(CONFIG, HASTY)
        found.record_heartbeat(AT + 1, CONFIG.heartbeat_interval_s, HASTY)
        assert death_evidence(found, HASTY, AT + 10.9) is None

    def test_shorter_timeout_does_not_apply_to_heartbeats_without_interval(self) -> None:
        found = member()
        found.allow_for_settings_change(CONFIG, HASTY)
        found.record_heartbeat(AT + 1, 0.0, HASTY)
        assert death_evidence(found, HASTY, AT + 10.9) is None

    def test_shorter_timeout_applies_after_a_heartbeat_at_the_new_interval(self) -> None:
        found = member()
        found.allow_for_settings_change(CONFIG, HASTY)
        found.record_heartbeat(AT + 1, HASTY.heartbeat_interval_s, HASTY)
        assert death_evidence(found, HASTY, AT + 1.39) is None
        assert death_evidence(found, HASTY, AT + 1.4) is not None

    def test_longer_ones_hold_at_once(self) -> None:
        found = member()
        found.allow_for_settings_change(HASTY, CONFIG)
        assert death_evidence(found, CONFIG, AT + 9.9) is None
        assert death_evidence(found, CONFIG, AT + 10) is not None

    def test_longest_timeout_applies_until_a_heartbeat_at_the_newest_interval(self) -> None:
        found, middle = member(), ElasticTrainingConfig(worker_heartbeat_timeout_ms=1_000)
        found.allow_for_settings_change(CONFIG, middle)
        found.allow_for_settings_change(middle, HASTY)
        found.record_heartbeat(AT, middle.heartbeat_interval_s, HASTY)
        assert death_evidence(found, HASTY, AT + 9.9) is None
        found.allow_for_settings_change(HASTY, CONFIG)
        assert death_evidence(found, CONFIG, AT + 10) is not None

    def test_silence_uses_the_old_timeout_until_the_next_heartbeat(self) -> None:
        found = member(heard_at=AT)
        found.allow_for_settings_change(CONFIG, HASTY)
        assert not found.is_silent(silent_since(HASTY, AT + 5))
        found.record_heartbeat(AT, HASTY.heartbeat_interval_s, HASTY)
        assert found.is_silent(silent_since(HASTY, AT + 5))


def test_pulse_has_three_intervals_with_a_shorter_timeout() -> None:
    found = member()
    found.record_pulse(AT, PULSE_INTERVAL_S, 1.0)
    assert death_evidence(found, HASTY, AT + 3 * PULSE_INTERVAL_S - 0.01) is None
    found.record_pulse(AT, 0.1, 1.0)
    assert death_evidence(found, HASTY, AT + 0.39) is None
    assert death_evidence(found, HASTY, AT + 0.4) is not None


@pytest.mark.parametrize("interval_s", [1e9, float("inf"), float("nan"), -1.0])
def test_long_pulse_interval_does_not_delay_the_death_evidence(interval_s: float) -> None:
    found = member()
    found.record_pulse(AT, interval_s, 1.0)
    assert death_evidence(found, HASTY, AT + 3 * PULSE_INTERVAL_S) is not None


@pytest.mark.parametrize(("timeout_ms", "wanted_s"), [(10_000, 0.5), (1_500, 0.5), (600, 0.2), (1, 0.05)])
def test_a_pulse_speaks_so_often_that_two_of_its_words_may_be_lost(timeout_ms: int, wanted_s: float) -> None:
    config = ElasticTrainingConfig(worker_heartbeat_timeout_ms=timeout_ms)
    assert config.pulse_interval_s == pytest.approx(wanted_s)
    assert PULSE_INTERVAL_S_MIN <= config.pulse_interval_s <= PULSE_INTERVAL_S


@pytest.mark.parametrize(
    ("known", "is_well"),
    [
        ({"heard_at": AT + 1}, True),
        ({"heard_at": AT}, False),
        ({}, False),
        ({"heard_at": AT + 1, "lost_at": AT}, False),
        ({"heard_at": AT + 1, "drain_reason": "it wanted to"}, False),
    ],
)
def test_worker_with_heartbeats_and_no_drain_is_well(known: dict[str, Any], is_well: bool) -> None:
    assert member(**known).is_well(AT) is is_well
