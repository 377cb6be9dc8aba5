from __future__ import annotations

import itertools

import pytest

from forged.elastic.phases import OVER, TRANSITIONS, Cause, Phase, next_phase
from forged.errors import RequestRefused

UNLISTED = [pair for pair in itertools.product(Phase, Cause) if pair not in TRANSITIONS]


@pytest.mark.parametrize(("phase", "cause"), TRANSITIONS, ids=str)
def test_listed_transition_leads_to_its_phase(phase: Phase, cause: Cause) -> None:
    assert next_phase(phase, cause) is TRANSITIONS[phase, cause]


@pytest.mark.parametrize(("phase", "cause"), UNLISTED, ids=str)
def test_unlisted_transition_is_refused_by_phase_and_cause(phase: Phase, cause: Cause) -> None:
    with pytest.raises(RequestRefused) as refused:
        next_phase(phase, cause)
    assert refused.value.code == "phase_wrong"
    assert phase in refused.value.message
    assert cause.value in refused.value.message


def test_only_a_reopening_leads_out_of_a_job_that_is_over() -> None:
    assert [pair for pair in TRANSITIONS if pair[0] in OVER] == [(Phase.ABORTED, Cause.REOPENED)]


def test_every_phase_but_the_last_two_can_be_completed_and_given_up() -> None:
    for phase in set(Phase) - OVER:
        assert next_phase(phase, Cause.COMPLETED) is Phase.COMPLETED
        assert next_phase(phase, Cause.ABORTED) is Phase.ABORTED


def test_every_phase_but_the_first_is_reached_from_it() -> None:
    reached, before = {Phase.FORMING}, set[Phase]()
    while reached != before:
        before = set(reached)
        reached |= {after for (phase, _), after in TRANSITIONS.items() if phase in before}
    assert reached == set(Phase)


def test_no_world_holds_but_one_that_was_agreed_on() -> None:
    into_running = {(phase, cause) for (phase, cause), after in TRANSITIONS.items() if after is Phase.RUNNING}
    assert into_running == {(Phase.RESCALING, Cause.RESCALE_COMPLETED)}
