from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest
from msgspec import Raw

from forged.errors import PeerError, RequestRefused, Unavailable
from forged.jobs.model import AddNote, ShowJob
from forged.kernel.messages import Fence, Nothing
from forged.net.protocol.calls import BODY_BYTES_MAX, LIST_EVERY, SPAN_MAX, OutgoingCalls
from forged.net.protocol.messages import Failure, Reply
from forged.status.model import PingDaemon
from tests.net.manual_daemon import ManualClock

PING = PingDaemon()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def calls(clock: ManualClock) -> OutgoingCalls:
    return OutgoingCalls(clock)


def ask(calls: OutgoingCalls, timeout_s: float = 5.0) -> tuple[int, asyncio.Future[Any]]:
    return calls.open(PING, timeout_s, None)


def answer(calls: OutgoingCalls, number: int) -> None:
    calls.outcome(Reply(number, Raw(b"\x80")))


def note(calls: OutgoingCalls) -> int:
    return calls.open(AddNote("j", "text"), 60.0, None)[0]


async def test_numbers_grow_from_one_and_are_never_used_twice(calls: OutgoingCalls) -> None:
    first, _ = ask(calls)
    answer(calls, first)
    second, _ = ask(calls)
    calls.abandon(second)
    third, waiting = ask(calls)
    calls.fail_all(Unavailable("gone", "gone"))
    assert waiting.exception()
    fourth, _ = ask(calls)
    assert [first, second, third, fourth] == [1, 2, 3, 4]
    calls.abandon(fourth)


async def test_a_number_below_the_lowest_that_waits_is_acknowledged(calls: OutgoingCalls) -> None:
    assert calls.acknowledged == 0
    for _ in range(3):
        note(calls)
    answer(calls, 2)
    assert calls.acknowledged == 0
    answer(calls, 1)
    assert calls.acknowledged == 2
    answer(calls, 3)
    assert calls.acknowledged == 3


async def test_cancelled_request_is_acknowledged_too(calls: OutgoingCalls) -> None:
    note(calls)
    note(calls)
    assert calls.abandon(1)
    assert calls.acknowledged == 1
    assert not calls.abandon(1)


async def test_request_message_has_its_body_and_remaining_timeout(calls: OutgoingCalls, clock: ManualClock) -> None:
    number, _ = calls.open(AddNote("a", "hi"), 5.0, Fence(1, 2))
    clock.now += 2.0
    message = calls.message(number)
    assert (message.number, message.acknowledged, message.method) == (1, 0, "AddNote")
    assert msgpack.unpackb(message.body) == {"job": "a", "text": "hi"}
    assert (message.timeout_s, message.fence) == (3.0, Fence(1, 2))
    clock.now += 9.0
    assert calls.message(number).timeout_s == 0.0


async def test_a_request_that_is_sent_again_has_the_same_bytes(calls: OutgoingCalls) -> None:
    number, _ = calls.open(AddNote("a", "hi"), 5.0, None)
    assert bytes(calls.message(number).body) == bytes(calls.message(number).body)


async def test_the_answer_is_of_the_type_that_was_asked_for(calls: OutgoingCalls) -> None:
    number, waiting = ask(calls)
    answer(calls, number)
    assert await waiting == Nothing()


async def test_a_refusal_is_raised_as_it_was_said(calls: OutgoingCalls) -> None:
    number, waiting = ask(calls)
    calls.outcome(Failure(number, "refused", "no", "not so", "do otherwise"))
    with pytest.raises(RequestRefused) as caught:
        await waiting
    assert (caught.value.code, caught.value.message, caught.value.fix) == ("no", "not so", "do otherwise")


@pytest.mark.parametrize("body", [b"\x90", b"\x81\xa4name\xa1\xff", b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"])
async def test_an_answer_of_another_type_is_a_peer_error(calls: OutgoingCalls, body: bytes) -> None:
    number, waiting = calls.open(ShowJob("a"), 5.0, None)
    calls.outcome(Reply(number, Raw(body)))
    with pytest.raises(PeerError, match="invalid reply to ShowJob") as caught:
        await waiting
    assert caught.value.code == "reply_invalid"


async def test_unexpected_reply_is_dropped(calls: OutgoingCalls) -> None:
    answer(calls, 7)
    number, waiting = ask(calls)
    answer(calls, number)
    answer(calls, number)
    assert await waiting == Nothing()
    assert len(calls) == 0


async def test_an_answer_to_a_cancelled_caller_is_dropped(calls: OutgoingCalls) -> None:
    number, waiting = ask(calls)
    waiting.cancel()
    answer(calls, number)
    assert len(calls) == 0


async def test_a_request_without_an_answer_in_time_is_unavailable(calls: OutgoingCalls, clock: ManualClock) -> None:
    _, late = ask(calls, 0.001)
    _, patient = ask(calls, 3600.0)
    clock.now += 1.0
    with pytest.raises(Unavailable, match="the request may have been executed") as caught:
        await late
    assert caught.value.code == "deadline_exceeded"
    assert not patient.done()
    assert calls.unanswered() == [2]
    calls.fail_all(Unavailable("gone", "gone"))
    assert patient.exception()


async def test_an_earlier_deadline_is_not_kept_waiting_by_a_later_one(calls: OutgoingCalls, clock: ManualClock) -> None:
    _, patient = ask(calls, 3600.0)
    _, late = ask(calls, 0.001)
    clock.now += 1.0
    with pytest.raises(Unavailable):
        await late
    answer(calls, 1)
    assert await patient == Nothing()


async def test_one_failure_ends_everything_that_waits(calls: OutgoingCalls) -> None:
    waiting = [ask(calls)[1] for _ in range(3)]
    error = Unavailable("gone", "gone")
    calls.fail_all(error)
    assert [one.exception() for one in waiting] == [error] * 3
    assert calls.unanswered() == []


async def test_a_request_that_fits_into_no_frame_is_refused_before_it_has_a_number(calls: OutgoingCalls) -> None:
    with pytest.raises(RequestRefused) as caught:
        calls.open(AddNote("a", "x" * BODY_BYTES_MAX), 5.0, None)
    assert caught.value.code == "request_too_large"
    assert (len(calls), calls.acknowledged) == (0, 0)


async def test_old_waiting_requests_are_reported_periodically(calls: OutgoingCalls) -> None:
    slow = note(calls)
    said = []
    for _ in range(2 * (SPAN_MAX + LIST_EVERY)):
        number = note(calls)
        said.append(calls.message(number).waiting)
        answer(calls, number)
    assert calls.acknowledged == slow - 1
    assert 2 <= said.count((slow,)) <= len(said) // LIST_EVERY
    assert said.count(None) == len(said) - said.count((slow,))


async def test_a_read_that_waits_does_not_hold_back_the_acknowledgement(calls: OutgoingCalls) -> None:
    ask(calls)
    answer(calls, note(calls))
    third = note(calls)
    assert calls.message(third).acknowledged == third - 1
