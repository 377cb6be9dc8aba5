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
from tests.net.manual_daemon import BYE, CANCEL, FAILURE, PING, PONG, ManualClient, ManualClock, frame, until
from tests.net.recording_connections import Certificates, RecordingConnections

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


class ConnectionWithPeer:
    """A connection; the test acts as its peer."""

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
async def pair() -> ConnectionWithPeer:
    return ConnectionWithPeer()


def failure_of(pair: ConnectionWithPeer) -> tuple[str, str]:
    """The kind and code of the failure that was sent last."""
    message = pair.peer.heard()[-1]
    assert message[:2] == [FAILURE, 0]
    return message[2], message[3]


# Receiving.


async def test_messages_are_worked_off_in_order(pair: ConnectionWithPeer) -> None:
    pair.cancels(1, 3)
    assert pair.numbers() == [1, 2, 3]


async def test_over_its_limit_it_stops_reading_and_goes_on_where_it_was(pair: ConnectionWithPeer) -> None:
    pair.connection.admitted = 2
    pair.cancels(1, 5)
    assert (pair.numbers(), pair.transport.reading) == ([1, 2], False)
    pair.connection.admitted = 2
    pair.connection.work()
    assert (pair.numbers(), pair.transport.reading) == ([1, 2, 3, 4], False)
    pair.connection.admitted = 2
    pair.connection.work()
    assert (pair.numbers(), pair.transport.reading) == ([1, 2, 3, 4, 5], True)


async def test_it_stops_reading_as_soon_as_the_next_message_would_not_be_admitted(pair: ConnectionWithPeer) -> None:
    pair.connection.admitted = 1
    pair.cancels(1, 1)
    assert not pair.transport.reading


async def test_peer_with_many_messages_does_not_starve_other_connections(pair: ConnectionWithPeer) -> None:
    count = 2 * MESSAGES_PER_TURN + 1
    pair.cancels(1, count)
    assert (len(pair.numbers()), pair.transport.reading) == (MESSAGES_PER_TURN, False)
    await asyncio.sleep(0)
    assert len(pair.numbers()) == 2 * MESSAGES_PER_TURN
    await asyncio.sleep(0)
    assert pair.numbers() == list(range(1, count + 1))
    assert pair.transport.reading


async def test_queued_turn_keeps_its_position_when_other_events_occur(pair: ConnectionWithPeer) -> None:
    pair.cancels(1, 2 * MESSAGES_PER_TURN)
    pair.connection.work()
    pair.connection.resume_writing()
    assert len(pair.numbers()) == MESSAGES_PER_TURN
    await asyncio.sleep(0)
    assert len(pair.numbers()) == 2 * MESSAGES_PER_TURN


async def test_a_message_cut_anywhere_is_the_same_message(pair: ConnectionWithPeer) -> None:
    data = frame([CANCEL, 7]) + frame([CANCEL, 8])
    for index in range(len(data)):
        pair.peer.send_bytes(data[index : index + 1])
    assert pair.numbers() == [7, 8]


async def test_messages_before_invalid_bytes_are_processed_before_the_disconnect(pair: ConnectionWithPeer) -> None:
    pair.peer.send_bytes(frame([CANCEL, 1]) + bytes(4))
    assert pair.numbers() == [1]
    assert failure_of(pair) == ("peer", "frame_length")
    assert pair.transport.closed


async def test_messages_after_an_invalid_one_are_ignored(pair: ConnectionWithPeer) -> None:
    pair.peer.send_bytes(frame([99]) + frame([CANCEL, 1]))
    assert failure_of(pair) == ("peer", "message_invalid")
    pair.peer.send_bytes(frame([CANCEL, 2]))
    assert pair.numbers() == []


@given(st.lists(st.binary(max_size=40) | st.integers(0, 15).map(lambda n: frame([n, 1, 1])), max_size=10))
@settings(max_examples=200)
def test_any_input_is_processed_or_refused_without_an_exception(data: list[bytes]) -> None:
    async def play() -> None:
        pair = ConnectionWithPeer()
        for piece in data:
            if pair.transport.reading:
                pair.peer.send_bytes(piece)
        if pair.transport.closed:
            assert failure_of(pair)[0] == "peer" or b"\x04" in b"".join(data)
        pair.connection.abort()
        await until(lambda: pair.connection.lost)
        assert len(pair.connection.endings) == 1

    asyncio.run(play())


async def test_exception_in_a_message_handler_ends_only_that_connection(
    pair: ConnectionWithPeer, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(message: Any) -> None:
        raise KeyError("oops")

    pair.connection.act = stumble
    with caplog.at_level(logging.ERROR):
        pair.cancels(1, 2)
    assert failure_of(pair) == ("internal", "connection_broken")
    assert "a message raised an unexpected error" in caplog.text


# Ping, pong and failure.


async def test_a_ping_is_answered_with_its_nonce(pair: ConnectionWithPeer) -> None:
    pair.peer.send(PING, -5)
    assert await pair.peer.next(PONG) == [PONG, -5]
    assert pair.connection.messages == []


async def test_pong_is_accepted_without_a_reply(pair: ConnectionWithPeer) -> None:
    pair.peer.send(PONG, 1)
    assert (pair.connection.messages, pair.peer.heard()) == ([], [])


async def test_a_ping_before_the_hello_is_no_ping() -> None:
    pair = ConnectionWithPeer(Fresh(ManualClock()))
    pair.peer.send(PING, 1)
    assert pair.connection.messages == [Ping(1)]


async def test_a_failure_of_the_connection_ends_it_with_that_error(pair: ConnectionWithPeer) -> None:
    pair.peer.send(FAILURE, 0, "unavailable", "gone", "text", "fix")
    await pair.peer.lost()
    (error,) = pair.connection.endings
    assert isinstance(error, Unavailable)
    assert (error.code, error.message, error.fix) == ("gone", "text", "fix")


# Sending.


async def test_first_message_is_written_at_once_and_the_rest_in_one_write(pair: ConnectionWithPeer) -> None:
    for number in range(1, 4):
        pair.connection.send(Cancel(number))
    assert pair.transport.writes == 1
    await asyncio.sleep(0)
    assert pair.transport.writes == 2
    assert pair.peer.heard() == [[CANCEL, 1], [CANCEL, 2], [CANCEL, 3]]


async def test_answers_to_one_read_are_sent_in_one_write(pair: ConnectionWithPeer) -> None:
    pair.connection.act = lambda message: pair.connection.send(message)
    pair.cancels(1, 3)
    assert pair.transport.writes == 1


async def test_much_leaves_before_the_turn_is_over_so_that_a_reader_that_does_not_read_is_noticed(
    pair: ConnectionWithPeer,
) -> None:
    pair.connection.act = lambda message: pair.connection.send(Bye(0, "x" * 100_000))
    pair.transport.stop_reading()
    pair.cancels(1, MESSAGES_PER_TURN)
    assert pair.connection.write_paused
    assert len(pair.numbers()) < 20
    assert pair.transport.unread < LIMITS.write_buffer_bytes_max + WRITE_BYTES + 100_100


async def test_a_peer_that_does_not_read_is_not_read_either_until_it_does(pair: ConnectionWithPeer) -> None:
    pair.transport.stop_reading()
    pair.connection.send(Bye(0, "x" * (2 << 20)))
    assert pair.connection.write_paused
    pair.cancels(1, 1)
    assert (pair.numbers(), pair.transport.reading) == ([], False)
    pair.transport.resume_peer_reading()
    assert (pair.numbers(), pair.transport.reading) == ([1], True)
    assert pair.connection.resumed_times == 1


async def test_a_message_that_the_other_end_would_refuse_is_not_sent(pair: ConnectionWithPeer) -> None:
    with pytest.raises(RequestRefused) as caught:
        pair.connection.send(Bye(0, "x" * FRAME_BYTES_MAX))
    assert caught.value.code == "message_too_large"
    pair.connection.send(Cancel(1))
    assert await pair.peer.next() == [CANCEL, 1]


# Re-entrant calls.


async def test_it_may_be_closed_over_a_message(pair: ConnectionWithPeer) -> None:
    pair.connection.act = lambda message: pair.connection.close()
    pair.cancels(1, 3)
    assert pair.numbers() == [1]
    await pair.peer.lost()
    assert len(pair.connection.endings) == 1


async def test_it_may_be_aborted_over_a_message(pair: ConnectionWithPeer) -> None:
    pair.connection.act = lambda message: pair.connection.abort()
    pair.cancels(1, 1)
    await pair.peer.lost()
    assert pair.transport.aborted


async def test_working_while_working_does_nothing(pair: ConnectionWithPeer) -> None:
    pair.connection.act = lambda message: pair.connection.work()
    pair.cancels(1, 3)
    assert pair.numbers() == [1, 2, 3]


async def test_writing_may_clog_while_a_message_is_worked_off(pair: ConnectionWithPeer) -> None:
    def answer(message: Any) -> None:
        pair.connection.send(Bye(0, "x" * (3 << 20)))

    pair.connection.act = answer
    pair.transport.stop_reading()
    pair.cancels(1, 3)
    assert (pair.numbers(), pair.transport.reading) == ([1], False)


# Closing.


async def test_close_flushes_sent_messages(pair: ConnectionWithPeer) -> None:
    pair.connection.send(Cancel(1))
    pair.connection.close()
    assert pair.peer.heard() == [[CANCEL, 1]]


async def test_nothing_is_sent_or_received_after_closing(pair: ConnectionWithPeer) -> None:
    pair.connection.close()
    pair.connection.send(Cancel(1))
    pair.peer.send_bytes(frame([CANCEL, 2]))
    await asyncio.sleep(0)
    assert (pair.peer.heard(), pair.numbers()) == ([], [])


async def test_protocol_callbacks_after_close_are_harmless(pair: ConnectionWithPeer) -> None:
    connection = pair.connection
    connection.close()
    connection.pause_writing()
    connection.resume_writing()
    connection.data_received(bytes(4))
    assert connection.eof_received() is False
    connection.connection_lost(None)
    connection.connection_lost(OSError("again"))
    connection.close()
    connection.fail(PeerError("late", "late"))
    connection.sweep(pair.clock.now + 100)
    connection.work()
    assert len(connection.endings) == 1


async def test_connection_end_is_reported_once_with_its_reason(pair: ConnectionWithPeer) -> None:
    error = PeerError("why", "that is why")
    pair.connection.fail(error)
    await pair.peer.lost()
    assert pair.connection.endings == [error]


@pytest.mark.parametrize("cause", [None, ConnectionResetError("reset by peer")])
async def test_a_connection_that_is_lost_is_unavailable(pair: ConnectionWithPeer, cause: Exception | None) -> None:
    pair.connection.connection_lost(cause)
    (error,) = pair.connection.endings
    assert (error.kind, error.code) == ("unavailable", "connection_lost")
    assert cause is None or str(cause) in error.message


async def test_connection_aborted_before_it_was_made_is_closed_when_made() -> None:
    connection = Recorded(ManualClock())
    connection.close()
    assert len(connection.endings) == 1
    peer = ManualClient(connection)
    assert peer.transport.aborted
    await peer.lost()
    assert len(connection.endings) == 1


# UserTimeout.


async def test_after_a_while_of_silence_it_pings_and_a_pong_is_enough(pair: ConnectionWithPeer) -> None:
    for _ in range(10):
        pair.sweep(LIMITS.ping_after_s + 0.1)
        assert await pair.peer.next() == [PING, 0]
        pair.sweep(1.0)
        assert pair.peer.heard() == []
        pair.peer.send(PONG, 0)
    assert not pair.transport.closed


async def test_no_ping_is_sent_before_the_hello() -> None:
    pair = ConnectionWithPeer(Fresh(ManualClock()))
    pair.sweep(LIMITS.ping_after_s + 0.1)
    await asyncio.sleep(0)
    assert pair.peer.heard() == []


async def test_silent_peer_is_disconnected(pair: ConnectionWithPeer) -> None:
    pair.sweep(LIMITS.silence_max_s)
    assert not pair.transport.closed
    pair.sweep(0.1)
    assert failure_of(pair) == ("unavailable", "silent")


async def test_a_frame_that_is_not_whole_in_time_is_too_slow_however_busily_it_comes(pair: ConnectionWithPeer) -> None:
    data = frame([CANCEL, 1 << 40])
    for index in range(len(data) - 1):
        pair.peer.send_bytes(data[index : index + 1])
        pair.sweep(LIMITS.frame_timeout_s / (len(data) - 2))
    pair.sweep(0.1)
    assert failure_of(pair) == ("peer", "frame_slow")


async def test_each_frame_has_its_own_time(pair: ConnectionWithPeer) -> None:
    data = frame([CANCEL, 1])
    pair.peer.send_bytes(data[:3])
    for _ in range(5):
        pair.sweep(LIMITS.frame_timeout_s - 1)
        pair.peer.send_bytes(data[3:] + data[:3])
    assert not pair.transport.closed
    assert len(pair.numbers()) == 5


async def test_peer_is_not_timed_out_while_its_input_is_not_read(pair: ConnectionWithPeer) -> None:
    pair.connection.admitted = 1
    pair.peer.send_bytes(frame([CANCEL, 1]) + frame([CANCEL, 2])[:5])
    pair.sweep(3600)
    pair.connection.admitted = 1
    pair.connection.work()
    pair.sweep(LIMITS.frame_timeout_s - 1)
    assert not pair.transport.closed
    pair.peer.send_bytes(frame([CANCEL, 2])[5:])
    assert pair.numbers() == [1, 2]


async def test_peer_is_pinged_while_its_input_is_not_read(pair: ConnectionWithPeer) -> None:
    pair.connection.admitted = 0
    pair.connection.work()
    for _ in range(3):
        pair.sweep(LIMITS.ping_after_s + 0.1)
        assert await pair.peer.next() == [PING, 0]


async def test_peer_that_reads_nothing_is_disconnected(pair: ConnectionWithPeer) -> None:
    pair.transport.stop_reading()
    pair.connection.send(Bye(0, "x" * (2 << 20)))
    pair.peer.send(CANCEL, 1)
    pair.sweep(LIMITS.silence_max_s)
    assert not pair.transport.closed
    pair.sweep(0.1)
    assert pair.transport.closed
    pair.sweep(LIMITS.linger_s + 0.1)
    assert pair.transport.aborted
    await pair.peer.lost()
    assert pair.connection.endings[0].code == "not_reading"


async def test_slow_reader_stays_connected(pair: ConnectionWithPeer) -> None:
    pair.transport.stop_reading()
    pair.connection.send(Bye(0, "x" * (3 << 20)))
    pair.peer.send(CANCEL, 1)
    for _ in range(5):
        pair.sweep(LIMITS.silence_max_s - 1)
        pair.transport.unread -= 100_000
    assert not pair.transport.closed


async def test_peer_that_does_not_read_the_failure_is_disconnected(pair: ConnectionWithPeer) -> None:
    pair.transport.stop_reading()
    pair.connection.fail(PeerError("code", "text"))
    await asyncio.sleep(0)
    assert not pair.connection.lost
    pair.sweep(LIMITS.linger_s + 0.1)
    await until(lambda: pair.connection.lost)
    assert pair.connection.endings[0].code == "code"


async def test_before_hellos_are_exchanged_frames_are_small() -> None:
    pair = ConnectionWithPeer(Fresh(ManualClock()))
    pair.peer.send_bytes(struct.pack(">I", LIMITS.hello_bytes_max + 1))
    assert failure_of(pair) == ("peer", "frame_length")


async def test_then_they_may_be_as_large_as_the_limit(pair: ConnectionWithPeer) -> None:
    payload = msgpack.packb([BYE, 1, "x" * (FRAME_BYTES_MAX - 8)])
    pair.peer.send_bytes(struct.pack(">I", len(payload)) + payload)
    assert isinstance(pair.connection.messages[0], Bye)
    pair.peer.send_bytes(struct.pack(">I", FRAME_BYTES_MAX + 1))
    assert failure_of(pair) == ("peer", "frame_length")


async def test_lost_connection_leaves_no_reference_cycle(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    clock, gone = ManualClock(), asyncio.Event()
    held: list[weakref.ref[Connection]] = []

    def accepted() -> Connection:
        connection = Recorded(clock)
        held.append(weakref.ref(connection, lambda _: gone.set()))
        return connection

    network = SystemNetwork(tls_server=certificates.server(), tls_client=certificates.client())
    listener = connections.keep(await network.listen(Address("tls", host="127.0.0.1"), accepted))
    gc.disable()
    try:
        transport = await network.connect(listener.address, connections.near)
        transport.close()
        async with asyncio.timeout(GONE_WITHIN_S):
            await gone.wait()
    finally:
        gc.enable()
