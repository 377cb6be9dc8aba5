from __future__ import annotations

import asyncio
import gc
import logging
import struct
import weakref
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.net.protocol.frames import FRAME_BYTES_MAX
from forged.net.protocol.messages import Bye, Cancel, Ping
from forged.net.transport.connection import MESSAGES_PER_TURN, WRITE_BYTES, Connection, ConnectionLimits
from forged.net.transport.port import Address
from forged.net.transport.sockets import SystemNetwork
from tests.net.ends import Certificates, Ends
from tests.net.manual_daemon import BYE, CANCEL, FAILURE, PING, PONG, ManualClient, ManualClock, frame, until

LIMITS = ConnectionLimits()
GONE_WITHIN_S = 30.0


class Recorded(Connection):
    """A connection that records its messages and is controlled by the test."""

    def __init__(self, clock: ManualClock, limits: ConnectionLimits = LIMITS) -> None:
        super().__init__(clock, limits)
        self.messages: list[Any] = []
        self.admitted = 1_000_000
        self.endings: list[ForgedError] = []
        self.resumed_times = 0
        self.act: Callable[[Any], None] = lambda message: None
        """The reaction to a message."""

    def opened(self) -> None:
        self.established()

    def admits(self) -> bool:
        return self.admitted > 0 and super().admits()

    def received(self, message: Any) -> None:
        self.admitted -= 1
        self.messages.append(message)
        self.act(message)

    def write_resumed(self) -> None:
        self.resumed_times += 1

    def ended(self, error: ForgedError) -> None:
        self.endings.append(error)


class Fresh(Recorded):
    """A connection before its hello."""

    def opened(self) -> None:
        """More messages are expected."""


class Scene:
    """A connection whose peer is played by the test."""

    def __init__(self, connection: Recorded | None = None) -> None:
        self.clock = ManualClock()
        self.connection = connection or Recorded(self.clock)
        self.peer = ManualClient(self.connection)
        self.transport = self.peer.transport

    def numbers(self) -> list[int]:
        """The numbers of the received cancels."""
        return [message.number for message in self.connection.messages]

    def sweep(self, seconds: float) -> None:
        self.clock.now += seconds
        self.connection.sweep(self.clock.now)

    def cancels(self, first: int, last: int) -> None:
        self.peer.send_bytes(b"".join(frame([CANCEL, number]) for number in range(first, last + 1)))


@pytest.fixture
async def scene() -> Scene:
    return Scene()


def failure_of(scene: Scene) -> tuple[str, str]:
    """The kind and code of the failure that was sent last."""
    message = scene.peer.heard()[-1]
    assert message[:2] == [FAILURE, 0]
    return message[2], message[3]


# Receiving.


async def test_messages_are_worked_off_in_order(scene: Scene) -> None:
    scene.cancels(1, 3)
    assert scene.numbers() == [1, 2, 3]


async def test_over_its_limit_it_stops_reading_and_goes_on_where_it_was(scene: Scene) -> None:
    scene.connection.admitted = 2
    scene.cancels(1, 5)
    assert (scene.numbers(), scene.transport.reading) == ([1, 2], False)
    scene.connection.admitted = 2
    scene.connection.work()
    assert (scene.numbers(), scene.transport.reading) == ([1, 2, 3, 4], False)
    scene.connection.admitted = 2
    scene.connection.work()
    assert (scene.numbers(), scene.transport.reading) == ([1, 2, 3, 4, 5], True)


async def test_it_stops_reading_as_soon_as_the_next_message_would_not_be_admitted(scene: Scene) -> None:
    scene.connection.admitted = 1
    scene.cancels(1, 1)
    assert not scene.transport.reading


async def test_one_who_sends_much_at_once_waits_while_others_have_their_turns(scene: Scene) -> None:
    count = 2 * MESSAGES_PER_TURN + 1
    scene.cancels(1, count)
    assert (len(scene.numbers()), scene.transport.reading) == (MESSAGES_PER_TURN, False)
    await asyncio.sleep(0)
    assert len(scene.numbers()) == 2 * MESSAGES_PER_TURN
    await asyncio.sleep(0)
    assert scene.numbers() == list(range(1, count + 1))
    assert scene.transport.reading


async def test_nobody_s_turn_comes_sooner_because_something_else_happens(scene: Scene) -> None:
    scene.cancels(1, 2 * MESSAGES_PER_TURN)
    scene.connection.work()
    scene.connection.resume_writing()
    assert len(scene.numbers()) == MESSAGES_PER_TURN
    await asyncio.sleep(0)
    assert len(scene.numbers()) == 2 * MESSAGES_PER_TURN


async def test_a_message_cut_anywhere_is_the_same_message(scene: Scene) -> None:
    data = frame([CANCEL, 7]) + frame([CANCEL, 8])
    for index in range(len(data)):
        scene.peer.send_bytes(data[index : index + 1])
    assert scene.numbers() == [7, 8]


async def test_what_precedes_garbage_is_worked_off_before_the_peer_is_let_go(scene: Scene) -> None:
    scene.peer.send_bytes(frame([CANCEL, 1]) + bytes(4))
    assert scene.numbers() == [1]
    assert failure_of(scene) == ("peer", "frame_length")
    assert scene.transport.closed


async def test_what_follows_garbage_is_not_looked_at(scene: Scene) -> None:
    scene.peer.send_bytes(frame([99]) + frame([CANCEL, 1]))
    assert failure_of(scene) == ("peer", "message_invalid")
    scene.peer.send_bytes(frame([CANCEL, 2]))
    assert scene.numbers() == []


@given(st.lists(st.binary(max_size=40) | st.integers(0, 15).map(lambda n: frame([n, 1, 1])), max_size=10))
@settings(max_examples=200)
def test_whatever_arrives_nothing_is_raised_and_the_peer_is_told_or_heard(data: list[bytes]) -> None:
    async def play() -> None:
        scene = Scene()
        for piece in data:
            if scene.transport.reading:
                scene.peer.send_bytes(piece)
        if scene.transport.closed:
            assert failure_of(scene)[0] == "peer" or b"\x04" in b"".join(data)
        scene.connection.abort()
        await until(lambda: scene.connection.lost)
        assert len(scene.connection.endings) == 1

    asyncio.run(play())


async def test_a_mistake_of_ours_over_a_message_ends_that_connection_only(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(message: Any) -> None:
        raise KeyError("oops")

    scene.connection.act = stumble
    with caplog.at_level(logging.ERROR):
        scene.cancels(1, 2)
    assert failure_of(scene) == ("internal", "connection_broken")
    assert "a message raised an unexpected error" in caplog.text


# Ping, pong and failure.


async def test_a_ping_is_answered_with_its_nonce(scene: Scene) -> None:
    scene.peer.send(PING, -5)
    assert await scene.peer.next(PONG) == [PONG, -5]
    assert scene.connection.messages == []


async def test_a_pong_is_heard_and_says_nothing(scene: Scene) -> None:
    scene.peer.send(PONG, 1)
    assert (scene.connection.messages, scene.peer.heard()) == ([], [])


async def test_a_ping_before_the_hello_is_no_ping() -> None:
    scene = Scene(Fresh(ManualClock()))
    scene.peer.send(PING, 1)
    assert scene.connection.messages == [Ping(1)]


async def test_a_failure_of_the_connection_ends_it_with_that_error(scene: Scene) -> None:
    scene.peer.send(FAILURE, 0, "unavailable", "gone", "text", "fix")
    await scene.peer.lost()
    (error,) = scene.connection.endings
    assert isinstance(error, Unavailable)
    assert (error.code, error.message, error.fix) == ("gone", "text", "fix")


# Sending.


async def test_what_is_sent_in_one_turn_leaves_at_once_and_the_rest_of_it_together(scene: Scene) -> None:
    for number in range(1, 4):
        scene.connection.send(Cancel(number))
    assert scene.transport.writes == 1
    await asyncio.sleep(0)
    assert scene.transport.writes == 2
    assert scene.peer.heard() == [[CANCEL, 1], [CANCEL, 2], [CANCEL, 3]]


async def test_answers_to_what_arrived_together_leave_together_and_at_once(scene: Scene) -> None:
    scene.connection.act = lambda message: scene.connection.send(message)
    scene.cancels(1, 3)
    assert scene.transport.writes == 1


async def test_much_leaves_before_the_turn_is_over_so_that_a_reader_that_does_not_read_is_noticed(
    scene: Scene,
) -> None:
    scene.connection.act = lambda message: scene.connection.send(Bye(0, "x" * 100_000))
    scene.transport.stop_reading()
    scene.cancels(1, MESSAGES_PER_TURN)
    assert scene.connection.write_paused
    assert len(scene.numbers()) < 20
    assert scene.transport.unread < LIMITS.write_buffer_bytes_max + WRITE_BYTES + 100_100


async def test_a_peer_that_does_not_read_is_not_read_either_until_it_does(scene: Scene) -> None:
    scene.transport.stop_reading()
    scene.connection.send(Bye(0, "x" * (2 << 20)))
    assert scene.connection.write_paused
    scene.cancels(1, 1)
    assert (scene.numbers(), scene.transport.reading) == ([], False)
    scene.transport.resume_peer_reading()
    assert (scene.numbers(), scene.transport.reading) == ([1], True)
    assert scene.connection.resumed_times == 1


async def test_a_message_that_the_other_end_would_refuse_is_not_sent(scene: Scene) -> None:
    with pytest.raises(RequestRefused) as caught:
        scene.connection.send(Bye(0, "x" * FRAME_BYTES_MAX))
    assert caught.value.code == "message_too_large"
    scene.connection.send(Cancel(1))
    assert await scene.peer.next() == [CANCEL, 1]


# Re-entrant calls.


async def test_it_may_be_closed_over_a_message(scene: Scene) -> None:
    scene.connection.act = lambda message: scene.connection.close()
    scene.cancels(1, 3)
    assert scene.numbers() == [1]
    await scene.peer.lost()
    assert len(scene.connection.endings) == 1


async def test_it_may_be_aborted_over_a_message(scene: Scene) -> None:
    scene.connection.act = lambda message: scene.connection.abort()
    scene.cancels(1, 1)
    await scene.peer.lost()
    assert scene.transport.aborted


async def test_working_while_working_does_nothing(scene: Scene) -> None:
    scene.connection.act = lambda message: scene.connection.work()
    scene.cancels(1, 3)
    assert scene.numbers() == [1, 2, 3]


async def test_writing_may_clog_while_a_message_is_worked_off(scene: Scene) -> None:
    def answer(message: Any) -> None:
        scene.connection.send(Bye(0, "x" * (3 << 20)))

    scene.connection.act = answer
    scene.transport.stop_reading()
    scene.cancels(1, 3)
    assert (scene.numbers(), scene.transport.reading) == ([1], False)


# Closing.


async def test_closing_lets_what_was_sent_leave_first(scene: Scene) -> None:
    scene.connection.send(Cancel(1))
    scene.connection.close()
    assert scene.peer.heard() == [[CANCEL, 1]]


async def test_nothing_is_sent_or_received_after_closing(scene: Scene) -> None:
    scene.connection.close()
    scene.connection.send(Cancel(1))
    scene.peer.send_bytes(frame([CANCEL, 2]))
    await asyncio.sleep(0)
    assert (scene.peer.heard(), scene.numbers()) == ([], [])


async def test_what_asyncio_calls_after_closing_is_survived(scene: Scene) -> None:
    connection = scene.connection
    connection.close()
    connection.pause_writing()
    connection.resume_writing()
    connection.data_received(bytes(4))
    assert connection.eof_received() is False
    connection.connection_lost(None)
    connection.connection_lost(OSError("again"))
    connection.close()
    connection.fail(PeerError("late", "late"))
    connection.sweep(scene.clock.now + 100)
    connection.work()
    assert len(connection.endings) == 1


async def test_the_end_is_told_once_with_its_reason(scene: Scene) -> None:
    error = PeerError("why", "that is why")
    scene.connection.fail(error)
    await scene.peer.lost()
    assert scene.connection.endings == [error]


@pytest.mark.parametrize("cause", [None, ConnectionResetError("reset by peer")])
async def test_a_connection_that_is_lost_is_unavailable(scene: Scene, cause: Exception | None) -> None:
    scene.connection.connection_lost(cause)
    (error,) = scene.connection.endings
    assert (error.kind, error.code) == ("unavailable", "connection_lost")
    assert cause is None or str(cause) in error.message


async def test_a_connection_given_up_before_it_was_made_ends_and_is_dropped_when_it_is_made() -> None:
    connection = Recorded(ManualClock())
    connection.close()
    assert len(connection.endings) == 1
    peer = ManualClient(connection)
    assert peer.transport.aborted
    await peer.lost()
    assert len(connection.endings) == 1


# UserTimeout.


async def test_after_a_while_of_silence_it_pings_and_a_pong_is_enough(scene: Scene) -> None:
    for _ in range(10):
        scene.sweep(LIMITS.ping_after_s + 0.1)
        assert await scene.peer.next() == [PING, 0]
        scene.sweep(1.0)
        assert scene.peer.heard() == []
        scene.peer.send(PONG, 0)
    assert not scene.transport.closed


async def test_nobody_is_pinged_before_hellos_are_exchanged() -> None:
    scene = Scene(Fresh(ManualClock()))
    scene.sweep(LIMITS.ping_after_s + 0.1)
    await asyncio.sleep(0)
    assert scene.peer.heard() == []


async def test_one_that_stays_silent_is_let_go(scene: Scene) -> None:
    scene.sweep(LIMITS.silence_max_s)
    assert not scene.transport.closed
    scene.sweep(0.1)
    assert failure_of(scene) == ("unavailable", "silent")


async def test_a_frame_that_is_not_whole_in_time_is_too_slow_however_busily_it_comes(scene: Scene) -> None:
    data = frame([CANCEL, 1 << 40])
    for index in range(len(data) - 1):
        scene.peer.send_bytes(data[index : index + 1])
        scene.sweep(LIMITS.frame_timeout_s / (len(data) - 2))
    scene.sweep(0.1)
    assert failure_of(scene) == ("peer", "frame_slow")


async def test_each_frame_has_its_own_time(scene: Scene) -> None:
    data = frame([CANCEL, 1])
    scene.peer.send_bytes(data[:3])
    for _ in range(5):
        scene.sweep(LIMITS.frame_timeout_s - 1)
        scene.peer.send_bytes(data[3:] + data[:3])
    assert not scene.transport.closed
    assert len(scene.numbers()) == 5


async def test_one_that_is_not_read_is_not_blamed_for_its_silence_or_its_half_frame(scene: Scene) -> None:
    scene.connection.admitted = 1
    scene.peer.send_bytes(frame([CANCEL, 1]) + frame([CANCEL, 2])[:5])
    scene.sweep(3600)
    scene.connection.admitted = 1
    scene.connection.work()
    scene.sweep(LIMITS.frame_timeout_s - 1)
    assert not scene.transport.closed
    scene.peer.send_bytes(frame([CANCEL, 2])[5:])
    assert scene.numbers() == [1, 2]


async def test_one_that_is_not_read_is_still_pinged_so_that_its_end_is_noticed(scene: Scene) -> None:
    scene.connection.admitted = 0
    scene.connection.work()
    for _ in range(3):
        scene.sweep(LIMITS.ping_after_s + 0.1)
        assert await scene.peer.next() == [PING, 0]


async def test_one_that_reads_nothing_for_too_long_is_let_go(scene: Scene) -> None:
    scene.transport.stop_reading()
    scene.connection.send(Bye(0, "x" * (2 << 20)))
    scene.peer.send(CANCEL, 1)
    scene.sweep(LIMITS.silence_max_s)
    assert not scene.transport.closed
    scene.sweep(0.1)
    assert scene.transport.closed
    scene.sweep(LIMITS.linger_s + 0.1)
    assert scene.transport.aborted
    await scene.peer.lost()
    assert scene.connection.endings[0].code == "not_reading"


async def test_one_that_reads_slowly_is_borne_with(scene: Scene) -> None:
    scene.transport.stop_reading()
    scene.connection.send(Bye(0, "x" * (3 << 20)))
    scene.peer.send(CANCEL, 1)
    for _ in range(5):
        scene.sweep(LIMITS.silence_max_s - 1)
        scene.transport.unread -= 100_000
    assert not scene.transport.closed


async def test_one_that_does_not_take_the_last_word_is_cut_off(scene: Scene) -> None:
    scene.transport.stop_reading()
    scene.connection.fail(PeerError("code", "text"))
    await asyncio.sleep(0)
    assert not scene.connection.lost
    scene.sweep(LIMITS.linger_s + 0.1)
    await until(lambda: scene.connection.lost)
    assert scene.connection.endings[0].code == "code"


async def test_before_hellos_are_exchanged_frames_are_small() -> None:
    scene = Scene(Fresh(ManualClock()))
    scene.peer.send_bytes(struct.pack(">I", LIMITS.hello_bytes_max + 1))
    assert failure_of(scene) == ("peer", "frame_length")


async def test_then_they_may_be_as_large_as_the_limit(scene: Scene) -> None:
    payload = msgpack.packb([BYE, 1, "x" * (FRAME_BYTES_MAX - 8)])
    scene.peer.send_bytes(struct.pack(">I", len(payload)) + payload)
    assert isinstance(scene.connection.messages[0], Bye)
    scene.peer.send_bytes(struct.pack(">I", FRAME_BYTES_MAX + 1))
    assert failure_of(scene) == ("peer", "frame_length")


async def test_one_that_is_lost_leaves_nothing_for_the_garbage_collector(
    certificates: Certificates, ends: Ends
) -> None:
    clock, gone = ManualClock(), asyncio.Event()
    held: list[weakref.ref[Connection]] = []

    def accepted() -> Connection:
        connection = Recorded(clock)
        held.append(weakref.ref(connection, lambda _: gone.set()))
        return connection

    network = SystemNetwork(tls_server=certificates.server(), tls_client=certificates.client())
    listener = ends.keep(await network.listen(Address("tls", host="127.0.0.1"), accepted))
    gc.disable()
    try:
        transport = await network.connect(listener.address, ends.near)
        transport.close()
        async with asyncio.timeout(GONE_WITHIN_S):
            await gone.wait()
    finally:
        gc.enable()
