from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import anyio
import pytest

from forged.errors import ConfigError, PeerError, Unavailable
from forged.net.transport.port import Address, Network, Peer
from tests.simulation.environment.links import CALM, Faults
from tests.simulation.environment.loop import run
from tests.simulation.environment.network import HostNetwork, SimulatedNetwork
from tests.simulation.environment.recording_protocol import RecordingProtocol
from tests.simulation.environment.transport import HIGH_WATER_BYTES, WINDOW_BYTES, SimulatedTransport

HERE = Address.parse("tcp://b:7000")
ALWAYS = 1.0


class Recorder(RecordingProtocol):
    """Records its calls with their times."""

    def __init__(self, *, keep_open: bool = False) -> None:
        super().__init__(keep_open=keep_open)
        self.times_s: list[float] = []

    @property
    def heard(self) -> bytes:
        return b"".join(event for event in self.events if isinstance(event, bytes))

    @property
    def lost(self) -> object:
        return self.events[-1][1] if isinstance(self.events[-1], tuple) else None

    def note(self, event: object) -> None:
        super().note(event)
        self.times_s.append(asyncio.get_running_loop().time())


@dataclass
class Scene:
    """Hosts a and b, and a connection from a to b."""

    network: SimulatedNetwork
    a: HostNetwork
    b: HostNetwork
    client: Recorder = field(default_factory=Recorder)
    server: Recorder = field(default_factory=Recorder)

    async def connect(self, address: Address = HERE) -> None:
        await self.b.listen(address, lambda: self.server)
        await self.a.connect(address, lambda: self.client)
        await asyncio.sleep(1)


Act = Callable[[Scene], Coroutine[Any, Any, None]]


def play(act: Act, seed: int = 1, faults: Faults = CALM) -> tuple[Scene, list[str]]:
    """Run an action on a new network; returns the scene and its trace."""
    trace: list[str] = []

    async def main() -> Scene:
        loop = asyncio.get_running_loop()
        network = SimulatedNetwork(
            loop, Random(seed), faults, trace=lambda text: trace.append(f"{loop.time():.6f} {text}")
        )
        scene = Scene(network, network.host("a"), network.host("b"))
        await act(scene)
        return scene

    return run(main, seed), trace


def test_bytes_arrive_whole_and_in_order_in_pieces_of_any_size() -> None:
    sent = [bytes([number]) * (number * 37 % 500 + 1) for number in range(200)]

    async def act(scene: Scene) -> None:
        await scene.connect()
        for data in sent:
            scene.client.transport.write(data)
            await asyncio.sleep(0.0005)
        scene.client.transport.writelines([b"the", b"end"])
        scene.client.transport.close()
        await asyncio.sleep(10)

    sizes = set()
    for seed in range(10):
        server = play(act, seed, Faults(latency_s=(0, 0.01), split=0.3, merge=0.3))[0].server
        assert server.heard == b"".join(sent) + b"theend"
        sizes |= {len(event) for event in server.events if isinstance(event, bytes)}
    assert sizes - {len(data) for data in sent}
    assert max(sizes) > 500


def test_latency_lies_between_its_bounds() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.client.note("write")
        scene.client.transport.write(b"x")
        await asyncio.sleep(3)

    for seed in range(20):
        scene, _ = play(act, seed, Faults(latency_s=(1, 2)))
        assert 1 <= scene.server.times_s[1] - scene.client.times_s[1] <= 2


def test_bandwidth_delays_large_writes() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        for _ in range(5):
            scene.client.transport.write(bytes(10_000))
        await asyncio.sleep(10)

    server = play(act, faults=Faults(bytes_per_s=10_000))[0].server
    assert len(server.heard) == 50_000
    assert server.times_s[-1] > 5


def test_faults_of_one_direction_leave_the_other_alone() -> None:
    async def act(scene: Scene) -> None:
        scene.network.links.special["a", "b"] = Faults(latency_s=(5, 5))
        await scene.connect()
        scene.client.note("write")
        scene.client.transport.write(b"x")
        await asyncio.sleep(10)
        scene.server.note("write")
        scene.server.transport.write(b"y")
        await asyncio.sleep(1)
        scene.network.calm()
        scene.client.note("write")
        scene.client.transport.write(b"z")
        await asyncio.sleep(0.1)

    scene, _ = play(act)
    assert scene.server.times_s[1] == scene.client.times_s[1] + 5
    assert scene.client.times_s[2] < scene.server.times_s[2] + 1
    assert scene.server.heard == b"xz"


def test_a_protocol_is_never_called_from_within_its_own_write() -> None:
    depth = 0

    class Echo(Recorder):
        def data_received(self, data: bytes) -> None:
            nonlocal depth
            depth += 1
            assert depth == 1
            super().data_received(data)
            if len(self.heard) < 100:
                self.transport.write(data)
            depth -= 1

    async def act(scene: Scene) -> None:
        scene.client, scene.server = Echo(), Echo()
        await scene.connect(Address.parse("tcp://b:1"))
        scene.client.transport.write(b"x")
        await asyncio.sleep(60)

    scene, _ = play(act, faults=Faults(latency_s=(0, 0)))
    assert len(scene.server.heard) == 100


def test_reset_ends_both_sides_and_loses_bytes_in_flight() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.server.transport.write(b"reply under way")
        scene.network.links.special["a", "b"] = Faults(reset=ALWAYS)
        scene.client.transport.write(b"request")
        await asyncio.sleep(5)
        scene.client.transport.write(b"too late")
        await asyncio.sleep(5)

    scene, trace = play(act)
    assert scene.client.events == scene.server.events == ["made", ("lost", ConnectionResetError)]
    assert scene.client.times_s != scene.server.times_s
    assert any("is reset" in line for line in trace)


def test_nothing_arrives_behind_a_dropped_write_until_the_sender_gives_up() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.network.links.special["a", "b"] = Faults(drop=ALWAYS, give_up_after_s=(20, 20))
        scene.client.transport.write(b"vanishes")
        scene.network.links.special.clear()
        scene.client.transport.write(b"held up behind")
        await asyncio.sleep(10)
        scene.server.transport.write(b"the other direction works")
        await asyncio.sleep(5)
        scene.client.note("silence so far")
        await asyncio.sleep(10)

    scene, _ = play(act)
    assert scene.server.events == ["made", ("lost", ConnectionResetError)]
    assert scene.client.events == ["made", b"the other direction works", "silence so far", ("lost", TimeoutError)]


def test_a_dropped_write_is_not_repaired_by_the_end_of_a_partition() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.network.links.special["a", "b"] = Faults(drop=ALWAYS)
        scene.client.transport.write(b"vanishes")
        scene.network.partition(["a"], ["b"])
        scene.network.calm()
        await asyncio.sleep(60)

    assert play(act)[0].client.lost is TimeoutError


def test_a_duplicated_write_arrives_twice() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.network.links.faults = Faults(duplicate=ALWAYS)
        scene.client.transport.write(b"once")
        await asyncio.sleep(1)

    assert play(act)[0].server.heard == b"onceonce"


def test_partition_delays_bytes_until_it_heals() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.network.partition(["a"], ["b"])
        scene.client.transport.write(b"there")
        scene.server.transport.write(b"back")
        await asyncio.sleep(4)
        assert not scene.server.heard + scene.client.heard
        scene.network.heal()
        await asyncio.sleep(30)

    scene, _ = play(act)
    assert scene.server.events == ["made", b"there"]
    assert scene.client.events == ["made", b"back"]


def test_a_partition_outlasts_the_patience_of_a_sender_and_a_silent_receiver_never_knows() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.network.partition(["a"], ["b"])
        scene.client.transport.write(b"there")
        await asyncio.sleep(40)
        scene.network.heal()
        await asyncio.sleep(100)
        assert scene.server.events == ["made"]
        scene.server.transport.write(b"are you there?")
        await asyncio.sleep(1)

    scene, _ = play(act)
    assert scene.client.events == ["made", ("lost", TimeoutError)]
    assert scene.server.events == ["made", ("lost", ConnectionResetError)]


def test_keepalive_tells_a_silent_receiver() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.network.crash("a", host_gone=True)
        await asyncio.sleep(100)

    assert play(act)[0].server.events == ["made"]
    assert play(act, faults=Faults(keepalive_s=(2, 9)))[0].server.events == ["made", ("lost", TimeoutError)]


def test_one_way_partition_delivers_one_way_and_times_out_the_sender() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.network.partition(["b"], ["a"], one_way=True)
        scene.client.transport.write(b"there")
        await asyncio.sleep(1)
        assert scene.server.heard == b"there"
        await asyncio.sleep(40)

    scene, _ = play(act)
    assert scene.client.lost is TimeoutError
    assert scene.server.lost is ConnectionResetError


def test_timed_out_sender_stops_retransmission() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.network.partition(["a"], ["b"])
        scene.client.transport.write(b"there")
        await asyncio.sleep(10_000)

    _, trace = play(act)
    assert sum("gives up" in line for line in trace) == 1


def test_connect_without_a_listener_is_refused() -> None:
    async def act(scene: Scene) -> None:
        for address in ("tcp://b:7000", "tcp://nobody:1", "unix:///run/x", "tcp://127.0.0.1:9"):
            with pytest.raises(Unavailable, match="no process listens") as raised:
                await scene.a.connect(Address.parse(address), Recorder)
            assert raised.value.code == "connect_refused"

    play(act)


def test_connecting_through_a_partition_waits_for_its_end_or_for_the_timeout() -> None:
    async def act(scene: Scene) -> None:
        await scene.b.listen(HERE, lambda: scene.server)
        scene.network.partition(["a"], ["b"])
        with pytest.raises(Unavailable) as raised:
            await scene.a.connect(HERE, Recorder)
        assert raised.value.code == "connect_timeout"
        assert 5 <= asyncio.get_running_loop().time() < 6
        asyncio.get_running_loop().call_later(3, scene.network.heal)
        await scene.a.connect(HERE, lambda: scene.client)

    assert play(act)[0].client.events == ["made"]


def test_cancelled_connect_ends_the_connection_at_the_server() -> None:
    async def act(scene: Scene) -> None:
        scene.network.links.special["b", "a"] = Faults(latency_s=(3, 3))
        await scene.b.listen(HERE, lambda: scene.server)
        with anyio.move_on_after(1):
            await scene.a.connect(HERE, lambda: scene.client)
        await asyncio.sleep(5)

    scene, _ = play(act)
    assert scene.server.events == ["made", "eof", ("lost", type(None))]
    assert not scene.client.events


def test_killed_process_receives_nothing_and_its_peers_lose_connections() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.client.transport.write(b"under way")
        scene.network.crash("b")
        scene.server.transport.write(b"from beyond")
        await asyncio.sleep(100)
        with pytest.raises(Unavailable, match="no process listens"):
            await scene.a.connect(HERE, Recorder)
        for call in (scene.b.listen, scene.b.connect):
            with pytest.raises(Unavailable, match="was killed"):
                await call(HERE, Recorder)

    ends = set()
    for seed in range(20):
        scene, _ = play(act, seed)
        assert scene.server.events == ["made"]
        assert not scene.client.heard
        ends.add(str(scene.client.events[1:]))
    assert len(ends) == 2, "some are reset, some are closed in order"


def test_bytes_sent_before_a_kill_arrive() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.server.transport.write(b"last words")
        scene.network.crash("b")
        await asyncio.sleep(1)

    assert play(act)[0].client.heard == b"last words"


def test_process_killed_before_it_writes_sends_its_end_without_what_was_in_flight() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.server.transport.write(b"first")
        await asyncio.sleep(1)
        scene.server.transport.write(b"last words")
        scene.network.kill(scene.b, unwritten=ALWAYS)
        await asyncio.sleep(1)

    client = play(act)[0].client
    assert client.heard == b"first"
    assert client.events[-1] != b"first", "its end is heard"


def test_lost_host_sends_no_end_and_times_out_its_peers() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.server.transport.write(b"last words")
        scene.network.crash("b", host_gone=True)
        await asyncio.sleep(60)
        assert scene.client.events == ["made"]
        with pytest.raises(Unavailable) as raised:
            await scene.a.connect(HERE, Recorder)
        assert raised.value.code == "connect_timeout"
        scene.client.transport.write(b"are you there?")
        await asyncio.sleep(60)

    assert play(act)[0].client.events == ["made", ("lost", TimeoutError)]


def test_a_host_that_is_back_resets_the_connections_it_does_not_know() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.network.crash("b", host_gone=True)
        scene.client.transport.write(b"are you there?")
        await asyncio.sleep(1)
        again = scene.network.host("b")
        await again.listen(HERE, Recorder)
        await asyncio.sleep(1)
        await scene.a.connect(HERE, Recorder)

    assert play(act)[0].client.events == ["made", ("lost", ConnectionResetError)]


def test_kill_of_one_process_keeps_other_processes_of_its_host() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        other, heard = scene.network.host("b"), Recorder()
        await other.listen(replace(HERE, port=7001), lambda: heard)
        transport = await scene.a.connect(replace(HERE, port=7001), Recorder)
        scene.network.kill(scene.b)
        transport.write(b"x")
        await asyncio.sleep(1)
        assert heard.events == ["made", b"x"]

    assert isinstance(play(act)[0].client.events[-1], tuple)


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("killed_after_s", [0.002 * step for step in range(15)])
def test_process_killed_during_connect_receives_no_events(victim: str, killed_after_s: float) -> None:
    async def act(scene: Scene) -> None:
        async def kill() -> None:
            await asyncio.sleep(killed_after_s)
            scene.network.crash(victim)
            before = list(hears.events)
            await asyncio.sleep(10)
            assert hears.events == before

        hears = scene.client if victim == "a" else scene.server
        await scene.b.listen(HERE, lambda: scene.server)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            with contextlib.suppress(Unavailable):
                (await scene.a.connect(HERE, lambda: scene.client)).write(b"x")

    for seed in range(10):
        play(act, seed, Faults(latency_s=(0, 0.02)))


@pytest.mark.parametrize("victim", ["a", "b"])
def test_process_killed_at_acceptance_receives_no_events(victim: str) -> None:
    async def act(scene: Scene) -> None:
        await scene.b.listen(HERE, lambda: scene.server)
        scene.network.links.trace = lambda text: scene.network.crash(victim) if "accepted" in text else None
        with pytest.raises(Unavailable, match="was killed") if victim == "a" else contextlib.nullcontext():
            await scene.a.connect(HERE, lambda: scene.client)
        await asyncio.sleep(1)

    scene, _ = play(act)
    assert not (scene.client if victim == "a" else scene.server).events


def test_an_end_that_does_not_read_pauses_the_other_and_reading_resumes_it() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.server.transport.pause_reading()
        for _ in range((WINDOW_BYTES + HIGH_WATER_BYTES) // 1024):
            scene.client.transport.write(bytes(1024))
        assert scene.client.events == ["made"]
        scene.client.transport.write(b"x")
        assert scene.client.events == ["made", "pause"]
        await asyncio.sleep(5)
        assert not scene.server.heard
        scene.server.transport.resume_reading()
        assert not scene.server.heard, "not from within the call"
        await asyncio.sleep(5)

    scene, _ = play(act)
    assert scene.client.events == ["made", "pause", "resume"]
    assert len(scene.server.heard) == WINDOW_BYTES + HIGH_WATER_BYTES + 1


def test_data_that_reaches_a_closed_end_is_answered_by_a_reset() -> None:
    async def act(scene: Scene) -> None:
        scene.client = Recorder(keep_open=True)
        await scene.connect()
        scene.server.transport.close()
        await asyncio.sleep(1)
        assert scene.client.events == ["made", "eof"]
        scene.client.transport.write(b"x")
        await asyncio.sleep(1)

    assert play(act)[0].client.events == ["made", "eof", ("lost", ConnectionResetError)]


def test_closing_with_unread_data_resets_the_other_end() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.server.transport.pause_reading()
        scene.client.transport.write(b"unread")
        await asyncio.sleep(1)
        scene.server.transport.close()
        await asyncio.sleep(1)

    assert play(act)[0].client.events == ["made", ("lost", ConnectionResetError)]


def test_an_end_that_does_not_read_learns_of_a_reset_by_writing() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.client.transport.pause_reading()
        scene.server.transport.pause_reading()
        scene.client.transport.write(b"unread")
        await asyncio.sleep(1)
        scene.server.transport.close()
        await asyncio.sleep(1)
        assert scene.client.events == ["made"]
        scene.client.transport.write(b"x")
        assert scene.client.events == ["made"], "not from within the call"
        await asyncio.sleep(0)

    assert play(act)[0].client.events == ["made", ("lost", ConnectionResetError)]


def test_an_end_that_waits_to_close_learns_of_a_reset() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.server.transport.pause_reading()
        scene.client.transport.set_write_buffer_limits(high=1 << 30)
        scene.client.transport.write(bytes(2 * WINDOW_BYTES))
        scene.client.transport.close()
        await asyncio.sleep(1)
        assert scene.client.events == ["made"]
        scene.server.transport.abort()
        await asyncio.sleep(1)

    assert play(act)[0].client.events == ["made", ("lost", ConnectionResetError)]


def test_end_of_stream_is_reported_once() -> None:
    async def act(scene: Scene) -> None:
        scene.server = Recorder(keep_open=True)
        await scene.connect()
        scene.client.transport.write_eof()
        scene.client.transport.write_eof()
        scene.client.transport.close()
        await asyncio.sleep(1)

    assert play(act)[0].server.events == ["made", "eof"]


def test_a_connection_that_breaks_while_it_is_made_is_made_and_then_lost() -> None:
    async def act(scene: Scene) -> None:
        def break_it() -> None:
            scene.network.links.special["b", "a"] = Faults(reset=ALWAYS)
            scene.server.transport.write(b"breaks")

        scene.network.links.special["b", "a"] = Faults(latency_s=(5, 5))
        asyncio.get_running_loop().call_later(1, break_it)
        await scene.b.listen(HERE, lambda: scene.server)
        await scene.a.connect(HERE, lambda: scene.client)
        assert scene.client.events == ["made"]
        await asyncio.sleep(1)

    assert play(act)[0].client.events == ["made", ("lost", ConnectionResetError)]


def test_a_protocol_that_fails_loses_its_connection_and_fails_the_run() -> None:
    class Failing(Recorder):
        def data_received(self, data: bytes) -> None:
            raise KeyError(data)

    async def act(scene: Scene) -> None:
        scene.server = Failing()
        await scene.connect()
        scene.client.transport.write(b"x")
        await asyncio.sleep(1)

    with pytest.raises(ExceptionGroup) as raised:
        play(act)
    assert repr(raised.value.exceptions) == "(KeyError(b'x'),)"


def test_peer_is_host_and_port_or_unix_user() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        assert scene.a.peer(scene.client.transport) == Peer("tcp", "b:7000")
        assert scene.b.peer(scene.server.transport).address.startswith("a:")
        assert scene.client.transport.get_extra_info("peername") == ("b", 7000)
        assert scene.client.transport.get_extra_info("sockname") == scene.server.transport.get_extra_info("peername")
        own = await scene.b.connect(Address.parse("tcp://localhost:7000"), Recorder)
        assert scene.b.peer(own).loopback
        path = Address.parse("unix:///run/forged.sock")
        await scene.b.listen(path, Recorder)
        unix = scene.b.peer(await scene.b.connect(path, Recorder))
        assert (unix.scheme, unix.loopback, unix.uid) == ("unix", True, 0)

    play(act)


def test_paths_and_loopback_doors_are_for_their_own_host_only() -> None:
    async def act(scene: Scene) -> None:
        for text in ("unix:///run/forged.sock", "tcp://127.0.0.1:8000"):
            await scene.b.listen(Address.parse(text), Recorder)
            await scene.b.connect(Address.parse(text), Recorder)
            with pytest.raises(Unavailable):
                await scene.a.connect(Address.parse(text), Recorder)
        with pytest.raises(Unavailable):
            await scene.a.connect(Address.parse("tcp://b:8000"), Recorder)

    play(act)


def test_port_zero_becomes_a_port_and_a_door_belongs_to_one() -> None:
    async def act(scene: Scene) -> None:
        first = await scene.b.listen(replace(HERE, port=0), Recorder)
        second = await scene.b.listen(Address.parse("tcp://0.0.0.0:0"), Recorder)
        assert len({first.address.port, second.address.port, 0}) == 3
        await scene.a.connect(first.address, Recorder)
        await scene.a.connect(replace(HERE, port=second.address.port), Recorder)
        with pytest.raises(ConfigError) as raised:
            await scene.b.listen(first.address, Recorder)
        assert raised.value.code == "address_in_use"
        await first.close()
        await first.close()
        await scene.b.listen(first.address, Recorder)
        with pytest.raises(ConfigError) as raised:
            await scene.b.listen(Address.parse("tcp://a:7000"), Recorder)
        assert raised.value.code == "address_not_available"

    play(act)


def test_tls_does_not_speak_with_tcp() -> None:
    async def act(scene: Scene) -> None:
        await scene.b.listen(HERE, Recorder)
        with pytest.raises(PeerError):
            await scene.a.connect(Address.parse("tls://b:7000"), Recorder)

    play(act)


def test_the_network_implements_the_port() -> None:
    async def act(scene: Scene) -> None:
        network: Network = scene.a
        assert network

    play(act)


def test_writing_after_the_end_of_file_is_an_error_and_after_closing_is_ignored() -> None:
    async def act(scene: Scene) -> None:
        await scene.connect()
        scene.client.transport.write_eof()
        with pytest.raises(RuntimeError):
            scene.client.transport.write(b"x")
        scene.server.transport.close()
        scene.server.transport.write(b"x")
        assert isinstance(scene.client.transport, SimulatedTransport)
        await asyncio.sleep(1)

    assert not play(act)[0].client.heard
