from __future__ import annotations

from forged.elastic.messages import JobPaused, JobResumed
from forged.elastic.outbox import Outbox


def test_take_empties_the_outbox() -> None:
    out = Outbox()
    out.publish(JobPaused("lunch"))
    out.mark_trigger()
    out.members.add("a")
    out.world = True
    taken = out.take()
    assert (taken.facts, taken.triggers, taken.members, taken.world) == (
        [JobPaused("lunch")],
        [JobPaused("lunch")],
        {"a"},
        True,
    )
    assert taken
    assert not out
    out.publish(JobResumed("done"))
    assert taken.facts == [JobPaused("lunch")]


def test_where_nothing_was_said_nothing_triggers() -> None:
    out = Outbox()
    out.mark_trigger()
    assert (out.triggers, bool(out)) == ([], False)
