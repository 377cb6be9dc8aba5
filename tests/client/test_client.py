"""`ForgedClient`: requests, reconnections and closing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forged.auth.messages import TokenCreated
from forged.auth.model import Role
from forged.client.client import REQUESTS_WAITING_MAX, ForgedClient
from forged.daemon import Daemon
from forged.errors import ConfigError, NotLeader, RequestRefused, Unavailable
from forged.jobs.model import AddNote, Job, NoteAdded
from forged.kernel.messages import Call, Record
from forged.net.protocol.messages import Bye, Reply, RequestMessage
from forged.net.transport.connection import ConnectionLimits
from forged.net.transport.sockets import SystemNetwork
from forged.paths import client_socket
from forged.retry import RetryPolicy
from forged.status.model import DaemonStarted, HandlerView, ReadStatus, Status
from tests.client.daemon_runner import SOON, DaemonRunner, config_in
from tests.client.example_messages import ExampleRequest, ExampleSignal
from tests.client.fake_daemon import FakeConnection, FakeDaemon
from tests.client.proxy import Proxy, cut_once
from tests.net.recording_connections import Certificates

TIMEOUT_S = 30.0


def client_of(*places: DaemonRunner | Proxy | FakeDaemon, **options: Any) -> ForgedClient:
    return ForgedClient(*(place.endpoint for place in places), **({"reconnect": SOON} | options))


async def notes(client: ForgedClient) -> list[str]:
    """The texts of all journalled notes, in order."""
    facts = [item.fact async for item in client.past_facts() if isinstance(item, Record)]
    return [fact.text for fact in facts if isinstance(fact, NoteAdded)]


async def never_reply(request: ExampleRequest, call: Call) -> str:
    await asyncio.Event().wait()
    return request.about


def serving(handler: Callable[[ExampleRequest, Call], Any]) -> Callable[[Daemon], None]:
    return lambda daemon: daemon.bus.serve(ExampleRequest, handler, owner="a test")


class TestCalls:
    async def test_status_is_typed(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            status = await client.status()
            assert isinstance(status, Status)
            assert status.socket == runner.config.socket
            assert await client.ping() >= 0

    async def test_job_is_created_changed_and_removed(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            job = await client.create_job("a", {"lr": 0.1})
            assert job == await client.job("a") == Job(**_fields(job))
            changed = await client.change_job("a", {"lr": 0.2}, job.version)
            assert changed.version == job.version + 1
            assert await client.jobs() == [changed]
            await client.remove_job("a")
            assert await client.jobs() == []

    async def test_lists_larger_than_a_frame_are_complete(self, runner: DaemonRunner) -> None:
        names = [f"j{number:02}" for number in range(80)]
        async with client_of(runner) as client:
            for name in names:
                await client.create_job(name, {"blob": "x" * 60_000})
            assert [job.name for job in await client.jobs()] == names

    async def test_tokens_are_listed_oldest_first_over_all_pages(self, runner: DaemonRunner) -> None:
        jobs = [f"{number:0128}" for number in range(256)]
        names = [f"bot-{number}" for number in range(40)]
        async with client_of(runner) as client:
            for name in names:
                await client.create_token(name, Role.VIEWER, jobs=jobs)
            assert [token.name for token in await client.tokens()] == names

    async def test_story_and_handlers_are_returned(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            (started,) = [item async for item in client.past_facts(DaemonStarted)]
            assert isinstance(started, Record)
            assert [record.id for record in await client.story(started.id)] == [started.id]
            handlers = await client.handlers()
            assert all(isinstance(handler, HandlerView) for handler in handlers)
            with pytest.raises(RequestRefused, match="not quarantined"):
                await client.readmit_handler(handlers[0].name)

    async def test_token_is_created_used_and_revoked(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            text = await client.create_token("bot", Role.VIEWER, jobs=["a"], ttl_s=60)
            (token,) = await client.tokens()
            assert (token.name, token.role, token.jobs) == ("bot", Role.VIEWER, ("a",))
            async with client_of(runner, token=text) as bot:
                assert await bot.jobs() == []
            assert (await client.revoke_token(token.token_id)).revoked_at is not None

    async def test_token_text_reaches_neither_daemon_nor_journal(self, runner: DaemonRunner, proxy: Proxy) -> None:
        async with client_of(proxy) as client:
            text = await client.create_token("bot", Role.VIEWER)
            (created,) = [item async for item in client.past_facts(TokenCreated)]
        assert isinstance(created, Record)
        assert text.encode() not in created.data
        assert not any(text.encode() in bytes(one.body) for _, one in proxy.seen if isinstance(one, RequestMessage))

    async def test_refusal_is_raised_with_its_code_and_fix(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            with pytest.raises(RequestRefused) as refused:
                await client.note("nobody", "hi")
            assert refused.value.code == "job_unknown"
            assert "forgectl jobs create" in refused.value.fix

    async def test_request_timeout_says_that_the_outcome_is_unknown(self, runner: DaemonRunner) -> None:
        runner.extend = serving(never_reply)
        await runner.reopen()
        async with client_of(runner) as client:
            with pytest.raises(Unavailable, match="may have been executed") as late:
                await client.request(ExampleRequest("life"), timeout_s=0.02)
            assert late.value.code == "deadline_exceeded"

    async def test_slow_request_does_not_delay_other_requests(self, runner: DaemonRunner) -> None:
        runner.extend = serving(never_reply)
        await runner.reopen()
        async with client_of(runner) as client:
            await client.create_job("a")
            slow = asyncio.create_task(client.request(ExampleRequest("life")))
            await asyncio.sleep(0)
            for number in range(5000):
                await client.note("a", f"{number}")
            slow.cancel()

    async def test_timeout_of_zero_is_not_the_default_timeout(self, runner: DaemonRunner) -> None:
        runner.extend = serving(never_reply)
        await runner.reopen()
        async with client_of(runner) as client:
            with pytest.raises(Unavailable, match="may have been executed"):
                await client.request(ExampleRequest("life"), timeout_s=0)

    async def test_deadline_error_without_a_daemon_names_the_connection_failure(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            await runner.close()
            with pytest.raises(Unavailable, match=r": .*(stopping|cannot connect)") as late:
                await client.request(ReadStatus(), timeout_s=0.02)
            assert late.value.code == "deadline_exceeded"

    async def test_cancelled_call_is_cancelled_at_the_daemon(self, runner: DaemonRunner) -> None:
        begun, stopped = asyncio.Event(), asyncio.Event()

        async def reply_when_cancelled(request: ExampleRequest, call: Call) -> str:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()
            return ""

        runner.extend = serving(reply_when_cancelled)
        await runner.reopen()
        async with client_of(runner) as client:
            call = asyncio.create_task(client.request(ExampleRequest("life")))
            await begun.wait()
            call.cancel()
            await stopped.wait()
            assert await client.ping() >= 0
        assert call.cancelled()

    @pytest.mark.parametrize("frame_bytes_max", [2 << 20, 8 << 20])
    async def test_request_larger_than_a_frame_is_refused_before_it_is_sent(
        self, runner: DaemonRunner, proxy: Proxy, frame_bytes_max: int
    ) -> None:
        await runner.reopen(frame_bytes_max=frame_bytes_max)
        async with client_of(proxy) as client:
            with pytest.raises(RequestRefused) as refused:
                await client.note("a", "x" * frame_bytes_max)
            assert refused.value.code == "request_too_large"
            assert await client.ping() >= 0
        assert proxy.connections == 1

    async def test_frame_limit_of_the_client_applies(self, runner: DaemonRunner) -> None:
        async with client_of(runner, limits=ConnectionLimits(frame_bytes_max=10_000)) as client:
            with pytest.raises(RequestRefused) as refused:
                await client.note("a", "x" * 10_000)
            assert refused.value.code == "request_too_large"
            await runner.reopen()
            assert await client.ping() >= 0

    async def test_requests_beyond_the_waiting_limit_are_queued(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            pings = await asyncio.gather(*(client.ping() for _ in range(REQUESTS_WAITING_MAX + 500)))
        assert len(pings) == REQUESTS_WAITING_MAX + 500

    async def test_queued_request_timeout_says_that_it_was_not_sent(self, runner: DaemonRunner) -> None:
        runner.extend = serving(never_reply)
        await runner.reopen()
        async with client_of(runner) as client:
            waiting = [asyncio.create_task(client.request(ExampleRequest("life"))) for _ in range(REQUESTS_WAITING_MAX)]
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="was not sent") as congested:
                await client.request(ReadStatus(), timeout_s=0.02)
            assert congested.value.code == "congested"
            for one in waiting:
                one.cancel()
            await asyncio.wait(waiting)
            assert await client.ping() >= 0

    async def test_large_requests_and_replies_do_not_deadlock(self, runner: DaemonRunner) -> None:
        settings = {"blob": "x" * 60_000}
        async with client_of(runner) as client:
            jobs = await asyncio.gather(*(client.create_job("a", settings) for _ in range(500)))
        assert {job.name for job in jobs} == {"a"}

    async def test_signal_reaches_the_daemon(self, runner: DaemonRunner) -> None:
        received: asyncio.Queue[Any] = asyncio.Queue()
        runner.extend = lambda daemon: daemon.bus.on_signal(
            ExampleSignal, lambda signal, call: received.put_nowait(signal), name="a test"
        )
        await runner.reopen()
        async with client_of(runner) as client:
            client.signal(ExampleSignal("psst"))
            assert await received.get() == ExampleSignal("psst")

    async def test_signal_without_a_connection_is_dropped(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            await runner.close()
            while client.connected:
                await asyncio.sleep(0)
            client.signal(ExampleSignal("psst"))
            assert client.endpoint is None


class TestConnectionChange:
    async def test_each_connection_is_told_when_it_is_made_and_when_it_is_lost(self, runner: DaemonRunner) -> None:
        seen: asyncio.Queue[bool] = asyncio.Queue()
        client = client_of(runner)
        client.connection_listeners.append(lambda: seen.put_nowait(client.connected))
        async with client, asyncio.timeout(TIMEOUT_S):
            assert await seen.get()
            await runner.close()
            assert not await seen.get()
            await runner.reopen()
            assert await seen.get()
            assert seen.empty()


class TestOpening:
    async def test_missing_daemon_error_says_how_to_start_one(self, tmp_path: Path) -> None:
        with pytest.raises(Unavailable, match="start one with `forged run`") as refused:
            async with ForgedClient(f"unix://{tmp_path}/none.sock", connect_timeout_s=0.05):
                pass
        assert refused.value.code == "no_daemon"

    async def test_default_endpoint_is_read_from_the_environment(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORGED_SOCKET", runner.config.socket)
        async with ForgedClient() as client:
            assert client.endpoint == runner.endpoint

    async def test_default_endpoint_without_environment_is_the_users_socket(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("FORGED_SOCKET", raising=False)
        assert [str(one) for one in ForgedClient().endpoints] == [f"unix://{client_socket(os.environ, os.getuid())}"]

    async def test_token_of_the_environment_sets_the_principal(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with ForgedClient(runner.endpoint) as operator:
            viewer = await operator.create_token("reader", Role.VIEWER)
        monkeypatch.setenv("FORGED_TOKEN", viewer)
        async with ForgedClient(runner.endpoint) as client:
            with pytest.raises(RequestRefused, match="reader has role viewer"):
                await client.create_job("a")
        async with ForgedClient(runner.endpoint, token="") as anonymous:
            assert (await anonymous.create_job("a")).name == "a"

    async def test_empty_token_in_the_environment_is_ignored(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORGED_TOKEN", "")
        async with ForgedClient(runner.endpoint) as client:
            assert (await client.create_job("a")).name == "a"

    async def test_invalid_endpoint_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="is invalid"):
            ForgedClient("gopher://somewhere")

    async def test_tcp_endpoint_of_a_tls_daemon_suggests_the_tls_endpoint(self, tmp_path: Path) -> None:
        network = SystemNetwork(tls_server=Certificates(tmp_path).server())
        runner = DaemonRunner(config_in(tmp_path / "tls", listen=("tls://127.0.0.1:0",)), network=network)
        (secure,) = (await runner.open()).listening
        with pytest.raises(Unavailable, match=f"use {secure}"):
            async with ForgedClient(secure.replace("tls://", "tcp://"), reconnect=RetryPolicy(attempts=1)):
                pass
        await runner.close()

    async def test_refused_token_fails_opening_at_once(self, runner: DaemonRunner) -> None:
        with pytest.raises(RequestRefused, match="token is unknown") as refused:
            async with client_of(runner, token="forged_0_0", connect_timeout_s=60):
                pass
        assert refused.value.code == "token_unknown"

    async def test_first_endpoint_that_answers_is_used(self, runner: DaemonRunner, tmp_path: Path) -> None:
        async with ForgedClient(f"unix://{tmp_path}/none.sock", runner.endpoint, reconnect=SOON) as client:
            assert client.endpoint == runner.endpoint
            assert await client.ping() >= 0

    async def test_unresponsive_endpoint_is_skipped(self, runner: DaemonRunner, tmp_path: Path) -> None:
        async with (
            FakeDaemon(tmp_path / "mute.sock", FakeConnection.wait_closed) as silent_daemon,
            client_of(silent_daemon, runner, connect_timeout_s=6.0) as client,
        ):
            assert client.endpoint == runner.endpoint

    async def test_use_before_opening_is_refused(self, runner: DaemonRunner) -> None:
        client = client_of(runner)
        with pytest.raises(RequestRefused, match="not open"):
            await client.ping()
        with pytest.raises(RequestRefused, match="not open"):
            async with client.facts():
                pass

    async def test_second_opening_is_refused(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            with pytest.raises(RequestRefused, match="opened only once"):
                await client.__aenter__()
            assert await client.ping() >= 0

    async def test_opening_can_be_cancelled(self, tmp_path: Path) -> None:
        arrived = asyncio.Event()

        async def keep_waiting(connection: FakeConnection) -> None:
            arrived.set()
            await connection.wait_closed()

        async with FakeDaemon(tmp_path / "mute.sock", keep_waiting) as silent_daemon:
            opening = asyncio.create_task(client_of(silent_daemon, connect_timeout_s=60).__aenter__())
            await arrived.wait()
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening


class TestDaemonLoss:
    async def test_call_during_daemon_absence_completes_after_its_return(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            await client.create_job("a")
            await runner.close()
            note = asyncio.create_task(client.note("a", "while you were out"))
            await asyncio.sleep(0)
            await runner.open()
            await note
            assert await notes(client) == ["while you were out"]

    async def test_lost_request_is_sent_again(self, runner: DaemonRunner, proxy: Proxy) -> None:
        async with client_of(proxy) as client:
            await client.create_job("a")
            proxy.rule = cut_once("up", RequestMessage)
            await client.note("a", "hello")
            assert proxy.cuts == 1
            assert await notes(client) == ["hello"]

    async def test_request_with_a_lost_reply_is_executed_once(self, runner: DaemonRunner, proxy: Proxy) -> None:
        async with client_of(proxy) as client:
            await client.create_job("a")
            proxy.rule = cut_once("down", Reply)
            await client.note("a", "hello")
            assert proxy.cuts == 1
            assert await notes(client) == ["hello"]
        sent = [one for way, one in proxy.seen if way == "up" and isinstance(one, RequestMessage)]
        first, again = (one for one in sent if one.method == AddNote.__name__)
        assert first.number == again.number

    async def test_requests_with_many_lost_replies_are_executed_once(self, runner: DaemonRunner, proxy: Proxy) -> None:
        replies = 0

        def every_seventh_answer(way: str, message: Any) -> bool:
            nonlocal replies
            replies += isinstance(message, Reply)
            return isinstance(message, Reply) and replies % 7 == 0

        async with client_of(proxy) as client:
            await client.create_job("a")
            proxy.rule = every_seventh_answer
            await asyncio.gather(*(client.note("a", f"note {number}") for number in range(50)))
            proxy.rule = lambda way, message: False
            assert sorted(await notes(client)) == sorted(f"note {number}" for number in range(50))
        assert proxy.cuts > 1

    async def test_request_is_executed_once_across_a_daemon_restart(self, runner: DaemonRunner, proxy: Proxy) -> None:
        async with client_of(proxy) as client:
            await client.create_job("a")
            proxy.rule = cut_once("down", Reply)
            note = asyncio.create_task(client.note("a", "hello"))
            while not proxy.cuts:
                await asyncio.sleep(0)
            await runner.reopen()
            await note
            assert await notes(client) == ["hello"]

    async def test_client_switches_to_the_next_endpoint(self, runner: DaemonRunner, tmp_path: Path) -> None:
        other = DaemonRunner(config_in(tmp_path / "other"))
        await other.open()
        async with client_of(runner, other) as client:
            assert client.endpoint == runner.endpoint
            await runner.close()
            assert (await client.status()).socket == other.config.socket
        await other.close()

    async def test_client_leaves_a_daemon_that_is_not_the_leader(self, runner: DaemonRunner, tmp_path: Path) -> None:
        async def refuse_as_follower(request: AddNote, call: Call, proceed: Any) -> Any:
            raise NotLeader("not_leader", "another daemon leads")

        follower = DaemonRunner(
            config_in(tmp_path / "other"),
            extend=lambda daemon: daemon.bus.wrap(AddNote, refuse_as_follower, owner="a test"),
        )
        await follower.open()
        async with client_of(runner) as direct, client_of(follower, runner) as client:
            await direct.create_job("a")
            assert client.endpoint == follower.endpoint
            await client.note("a", "hello")
            assert client.endpoint == runner.endpoint
            assert await notes(direct) == ["hello"]
        async with client_of(follower) as client:
            with pytest.raises(NotLeader):
                await client.note("a", "hello")
        await follower.close()

    async def test_revoked_token_ends_the_client_with_the_reason(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as operator:
            text = await operator.create_token("bot", Role.VIEWER)
            async with client_of(runner, token=text) as bot, bot.facts(since=None) as stream:
                (token,) = await operator.tokens()
                await operator.revoke_token(token.token_id)
                with pytest.raises(RequestRefused, match="revoked"):
                    await _exhaust(stream)
                with pytest.raises(RequestRefused, match="revoked") as refused:
                    await bot.ping()
                assert refused.value.code == "token_revoked"
                assert not bot.connected


class TestClosing:
    async def test_closing_fails_waiting_calls(self, runner: DaemonRunner) -> None:
        runner.extend = serving(never_reply)
        await runner.reopen()
        async with client_of(runner) as client:
            waiting = asyncio.create_task(client.request(ExampleRequest("life")))
            await client.ping()
        with pytest.raises(Unavailable) as closed:
            await waiting
        assert closed.value.code == "client_closed"

    async def test_closing_fails_waiting_streams(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            stream = await client.facts(since=None).__aenter__()
            waiting = asyncio.create_task(stream.__anext__())
            await client.ping()
        with pytest.raises(Unavailable) as closed:
            await waiting
        assert closed.value.code == "client_closed"

    async def test_use_after_closing_is_refused(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            await client.ping()
        with pytest.raises(Unavailable, match="was closed"):
            await client.ping()
        with pytest.raises(Unavailable, match="was closed"):
            async with client.facts():
                pass
        assert not client.connected

    async def test_closing_sends_bye_and_acknowledges_all_replies(self, runner: DaemonRunner, proxy: Proxy) -> None:
        async with client_of(proxy) as client:
            await client.create_job("a")
            await client.note("a", "hello")
        while len(runner.daemon.ledger.replies):
            await asyncio.sleep(0)
        assert [one for _, one in proxy.seen if isinstance(one, Bye)] == [Bye(2)]

    async def test_client_can_be_closed_while_the_daemon_is_down(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as client:
            await runner.close()
            while client.connected:
                await asyncio.sleep(0)

    async def test_error_raised_in_the_block_is_unchanged(self, runner: DaemonRunner) -> None:
        with pytest.raises(KeyError, match="mine"):
            async with client_of(runner):
                raise KeyError("mine")

    async def test_cancelling_the_block_passes_through(self, runner: DaemonRunner) -> None:
        opened = asyncio.Event()

        async def block() -> None:
            async with client_of(runner):
                opened.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(block())
        await opened.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_timeout_around_the_client_raises_timeout_error(self, runner: DaemonRunner) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02), client_of(runner):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            async with client_of(runner), asyncio.timeout(0.02):
                await asyncio.Event().wait()

    async def test_two_clients_in_one_loop_are_independent(self, runner: DaemonRunner) -> None:
        async with client_of(runner) as first, client_of(runner) as second:
            await asyncio.gather(first.create_job("a"), second.create_job("b"))
            async with second.facts(NoteAdded, since=None) as stream:
                await first.note("a", "hello")
                received = await anext(stream)
            assert isinstance(received, Record)
            assert received.fact == NoteAdded("hello")
            assert len(await first.jobs()) == 2


def _fields(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__struct_fields__}


async def _exhaust(stream: Any) -> None:
    async for _ in stream:
        pass
