from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forged.errors import PeerError, RequestRefused
from forged.jobs.model import NoteAdded
from forged.kernel.journal import Journal
from forged.kernel.messages import Record
from forged.net.protocol.messages import Facts, GapMessage, Subscribe
from forged.net.protocol.streams import (
    BATCH_BYTES_MAX,
    BATCH_FACTS_MAX,
    FILTER_NAMES_MAX,
    PROGRESS_IDS,
    SCAN_FACTS_MAX,
    OutgoingStream,
    StreamMessage,
)
from forged.status.model import DaemonStopping

HISTORY = "h1"
CREDIT = 10_000


def record(fact_id: int, job: str = "a", text: str = "x") -> Record:
    return Record.of(NoteAdded(text), fact_id=fact_id, at=1.0, job=job)


def journal(last: int, *, facts_max: int = 100_000, jobs: str = "a") -> Journal:
    """Facts 1 to `last`, in these jobs in turn."""
    made = Journal(facts_max)
    made.extend([record(fact_id, jobs[fact_id % len(jobs)]) for fact_id in range(1, last + 1)])
    return made


def subscribe(since: int | None = -1, credit: int = CREDIT, **fields: Any) -> Subscribe:
    asked: dict[str, Any] = {"history": HISTORY, "types": (), "jobs": ()} | fields
    return Subscribe(stream=7, since=since, credit=credit, **asked)


def stream(request: Subscribe, facts: Journal, allowed: frozenset[str] | None = None) -> OutgoingStream:
    return OutgoingStream(request, facts, HISTORY, allowed)


def advanced(reader: OutgoingStream, facts: Journal) -> list[StreamMessage]:
    """All messages until the stream has caught up."""
    messages = []
    while reader.due(facts):
        messages += reader.advance(facts)
    return messages


def ids(messages: list[StreamMessage]) -> list[int]:
    return [msgpack.unpackb(raw)[0] for message in messages if isinstance(message, Facts) for raw in message.records]


def gaps(messages: list[StreamMessage]) -> list[tuple[int, int]]:
    return [(message.first, message.last) for message in messages if isinstance(message, GapMessage)]


def test_first_message_has_the_start_position() -> None:
    facts = journal(5)
    for since, position in [(None, 5), (-1, 0), (0, 0), (3, 3)]:
        assert stream(subscribe(since), facts).advance(facts)[0] == Facts(7, position, ())


def test_start_position_is_sent_without_credit() -> None:
    facts = journal(5)
    reader = stream(subscribe(credit=0), facts)
    assert reader.due(facts)
    assert reader.advance(facts) == [Facts(7, 0, ())]
    assert not reader.due(facts)


def test_stream_from_now_skips_earlier_facts() -> None:
    facts = journal(5)
    reader = stream(subscribe(None), facts)
    advanced(reader, facts)
    facts.extend([record(6)])
    assert ids(advanced(reader, facts)) == [6]


def test_stream_continues_at_the_given_position() -> None:
    facts = journal(5)
    assert ids(advanced(stream(subscribe(3), facts), facts)) == [4, 5]


def test_all_that_are_kept_begins_at_the_floor_without_a_gap() -> None:
    facts = journal(20, facts_max=10)
    messages = advanced(stream(subscribe(-1), facts), facts)
    assert (ids(messages), gaps(messages)) == (list(range(11, 21)), [])


def test_a_position_that_is_forgotten_gives_a_gap_first() -> None:
    facts = journal(20, facts_max=10)
    messages = advanced(stream(subscribe(4), facts), facts)
    assert (gaps(messages), ids(messages)) == ([(5, 10)], list(range(11, 21)))


def test_a_position_of_another_history_gives_a_gap_and_all_that_is_kept() -> None:
    facts = journal(20, facts_max=10)
    messages = advanced(stream(subscribe(15, history="older"), facts), facts)
    assert (gaps(messages), ids(messages)) == ([(0, 10)], list(range(11, 21)))


def test_a_position_that_this_history_has_not_reached_is_of_another_one() -> None:
    facts = journal(5)
    messages = advanced(stream(subscribe(6), facts), facts)
    assert (gaps(messages), ids(messages)) == ([(0, 0)], [1, 2, 3, 4, 5])


def test_a_reader_that_knows_no_history_is_believed() -> None:
    facts = journal(5)
    assert gaps(advanced(stream(subscribe(3, history=""), facts), facts)) == []


def test_no_more_facts_are_sent_than_there_is_credit_for() -> None:
    facts = journal(10)
    reader = stream(subscribe(credit=3), facts)
    assert ids(advanced(reader, facts)) == [1, 2, 3]
    reader.grant(2)
    assert ids(advanced(reader, facts)) == [4, 5]


def test_more_credit_than_a_reader_can_mean_breaks_the_protocol() -> None:
    facts = journal(1)
    reader = stream(subscribe(credit=65_536), facts)
    with pytest.raises(PeerError) as caught:
        reader.grant(1)
    assert caught.value.code == "credit_overflow"


def test_reader_without_credit_gets_one_gap() -> None:
    facts = journal(10, facts_max=10)
    reader = stream(subscribe(credit=2), facts)
    assert ids(advanced(reader, facts)) == [1, 2]
    for fact_id in range(11, 31):
        facts.extend([record(fact_id)])
        assert advanced(reader, facts) == []
    reader.grant(CREDIT)
    messages = advanced(reader, facts)
    assert (gaps(messages), ids(messages)) == ([(3, 20)], list(range(21, 31)))


def test_a_filter_lets_its_types_and_jobs_through() -> None:
    facts = journal(6, jobs="ab")
    facts.extend([Record.of(DaemonStopping(1, "x"), fact_id=7, at=1.0)])
    assert ids(advanced(stream(subscribe(jobs=("b",)), facts), facts)) == [1, 3, 5]
    assert ids(advanced(stream(subscribe(types=("DaemonStopping",)), facts), facts)) == [7]
    assert ids(advanced(stream(subscribe(types=("DaemonStopping",), jobs=("b",)), facts), facts)) == []


def test_principal_bound_to_jobs_gets_no_facts_of_other_jobs_or_the_daemon() -> None:
    facts = journal(6, jobs="ab")
    facts.extend([Record.of(DaemonStopping(1, "x"), fact_id=7, at=1.0)])
    assert ids(advanced(stream(subscribe(), facts, frozenset("a")), facts)) == [2, 4, 6]


def test_a_batch_is_bounded_in_facts() -> None:
    facts = journal(BATCH_FACTS_MAX + 1)
    reader = stream(subscribe(), facts)
    assert len(ids(reader.advance(facts))) == BATCH_FACTS_MAX
    assert ids(reader.advance(facts)) == [BATCH_FACTS_MAX + 1]


def test_a_batch_is_bounded_in_bytes_but_for_one_fact() -> None:
    facts = Journal()
    facts.extend([record(fact_id, text="x" * (BATCH_BYTES_MAX // 2)) for fact_id in range(1, 4)])
    facts.extend([record(4, text="x" * 2 * BATCH_BYTES_MAX)])
    reader = stream(subscribe(), facts)
    assert [ids(reader.advance(facts)) for _ in range(4)] == [[1], [2], [3], [4]]


def test_turn_scans_a_bounded_part_of_the_journal() -> None:
    facts = journal(3 * SCAN_FACTS_MAX)
    reader = stream(subscribe(jobs=("unknown",)), facts)
    assert reader.advance(facts)[-1] == Facts(7, SCAN_FACTS_MAX, ())


def test_reader_without_matching_facts_gets_its_position_periodically() -> None:
    facts = journal(5)
    reader = stream(subscribe(None, jobs=("unknown",)), facts)
    assert advanced(reader, facts) == [Facts(7, 5, ())]
    facts.extend([record(fact_id) for fact_id in range(6, 5 + PROGRESS_IDS)])
    assert advanced(reader, facts) == []
    facts.extend([record(5 + PROGRESS_IDS)])
    assert advanced(reader, facts) == [Facts(7, 5 + PROGRESS_IDS, ())]


def test_reader_of_history_learns_that_it_has_caught_up_without_matching_facts() -> None:
    facts = journal(5)
    reader = stream(subscribe(jobs=("unknown",)), facts)
    assert advanced(reader, facts) == [Facts(7, 0, ()), Facts(7, 5, ())]
    facts.extend([record(6)])
    assert advanced(reader, facts) == []


def test_reader_of_history_learns_that_it_has_caught_up_without_credit() -> None:
    facts = journal(5, jobs="bab")
    reader = stream(subscribe(jobs=("a",), credit=2), facts)
    (_, last) = advanced(reader, facts)
    assert isinstance(last, Facts)
    assert (ids([last]), last.upto) == ([1, 4], 5)
    facts.extend([record(6, "b")])
    assert advanced(reader, facts) == []


def test_upto_covers_skipped_facts_after_the_last_match() -> None:
    facts = journal(4, jobs="bba")
    message = stream(subscribe(jobs=("a",)), facts).advance(facts)[-1]
    assert isinstance(message, Facts)
    assert (ids([message]), message.upto) == ([2], 4)


def test_a_stream_that_has_caught_up_has_nothing_due() -> None:
    facts = journal(3)
    reader = stream(subscribe(), facts)
    advanced(reader, facts)
    assert not reader.due(facts)
    facts.extend([record(4)])
    assert reader.due(facts)


@pytest.mark.parametrize("field", ["types", "jobs"])
@pytest.mark.parametrize("names", [("n",) * (FILTER_NAMES_MAX + 1), ("n" * 129,)])
def test_a_filter_that_costs_too_much_is_refused(field: str, names: tuple[str, ...]) -> None:
    filters: dict[str, Any] = {field: names}
    with pytest.raises(RequestRefused) as caught:
        stream(subscribe(**filters), journal(1))
    assert caught.value.code == "filter_too_large"


@given(
    since=st.none() | st.integers(-1, 60),
    facts_max=st.integers(1, 30),
    steps=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 10)), max_size=12),
    jobs=st.sampled_from([(), ("a",), ("b",), ("a", "b")]),
)
@example(since=-1, facts_max=23, steps=[(1, 0)], jobs=())
def test_every_fact_comes_once_in_order_or_lies_in_a_gap(
    since: int | None, facts_max: int, steps: list[tuple[int, int]], jobs: tuple[str, ...]
) -> None:
    facts = journal(40, facts_max=facts_max, jobs="ab")
    reader = stream(subscribe(since, credit=0, jobs=jobs), facts)
    asks_for_all = since is not None and not 0 <= since <= 40
    # Of all facts that are kept, the oldest may be older than one that was dropped.
    first = [one.id for one in facts.after(0, 40)] if asks_for_all else range((40 if since is None else since) + 1, 41)
    said: list[StreamMessage] = []
    for published, credit in [*steps, (0, 1000)]:
        next_id = facts.last + 1
        facts.extend([record(fact_id, "ab"[fact_id % 2]) for fact_id in range(next_id, next_id + published)])
        reader.grant(credit)
        said += advanced(reader, facts)
    seen = ids(said)
    assert seen == sorted(set(seen))
    missed = {fact_id for first, last in gaps(said) for fact_id in range(first, last + 1)}
    assert missed.isdisjoint(seen)
    wanted = {fact_id for fact_id in [*first, *range(41, facts.last + 1)] if not jobs or "ab"[fact_id % 2] in jobs}
    assert wanted - missed == set(seen)


def test_a_position_ahead_of_the_newest_fact_is_said_to_be_that_and_not_another_history() -> None:
    facts = journal(5)
    for history in (HISTORY, ""):
        gap = next(
            one for one in advanced(stream(subscribe(9, history=history), facts), facts) if type(one) is GapMessage
        )
        assert gap.reason == "fact 9 is ahead of the newest fact, 5"
