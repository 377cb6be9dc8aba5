"""Requests that the daemon sends to a client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forged.client import served_requests
from forged.client.client import ForgedClient
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.net.protocol.messages import Cancel, RequestMessage
from forged.net.session import Session
from tests.client.daemon_runner import DaemonRunner
from tests.client.example_messages import ExampleRequest
from tests.client.test_client import client_of


def session_of(runner: DaemonRunner) -> Session:
    (session,) = runner.daemon.server.sessions
    return session


def ask(runner: DaemonRunner, *, timeout_s: float = 60.0) -> tuple[int, asyncio.Future[Any]]:
    """Send a request from the daemon to its only client."""
    session = session_of(runner)
    number, answer = session.calls.open(ExampleRequest("life"), timeout_s, None)
    session.send(session.calls.message(number))
    return number, answer


async def ponder(request: ExampleRequest) -> str:
    return f"{request.about} is short"


async def never_reply(request: ExampleRequest) -> str:
    await asyncio.Event().wait()
    return ""


async def test_daemon_receives_the_reply(runner: DaemonRunner) -> None:
    async with client_of(runner) as client:
        client.serve(ExampleRequest, ponder)
        assert await ask(runner)[1] == "life is short"


async def test_replies_are_sent_as_they_are_ready(runner: DaemonRunner) -> None:
    slow = asyncio.Event()

    async def think(request: ExampleRequest) -> str:
        if not slow.is_set():
            slow.set()
            await asyncio.sleep(0.01)
            return "slow"
        return "fast"

    async with client_of(runner) as client:
        client.serve(ExampleRequest, think)
        first, second = ask(runner)[1], ask(runner)[1]
        assert await second == "fast"
        assert await first == "slow"


async def test_a_request_without_handler_is_refused(runner: DaemonRunner) -> None:
    async with client_of(runner):
        with pytest.raises(RequestRefused, match="does not answer 'ExampleRequest'"):
            await ask(runner)[1]


async def test_a_request_of_the_wrong_shape_is_refused(runner: DaemonRunner) -> None:
    async with client_of(runner) as client:
        client.serve(ExampleRequest, ponder)
        session = session_of(runner)
        number, answer = session.calls.open(ExampleRequest("life"), 60.0, None)
        whole = session.calls.message(number)
        session.send(RequestMessage(number, whole.acknowledged, whole.method, type(whole.body)(b"\x80"), 60.0))
        with pytest.raises(RequestRefused, match="about"):
            await answer


async def test_refusal_of_a_handler_reaches_the_daemon(runner: DaemonRunner) -> None:
    async def refuse(request: ExampleRequest) -> str:
        raise RequestRefused("too_deep", "that is too deep", "ask something else")

    async with client_of(runner) as client:
        client.serve(ExampleRequest, refuse)
        with pytest.raises(RequestRefused, match="too deep") as refused:
            await ask(runner)[1]
        assert (refused.value.code, refused.value.fix) == ("too_deep", "ask something else")


@pytest.mark.parametrize("broken", [ZeroDivisionError("division by zero"), None])
async def test_failing_handler_is_reported_at_both_ends(runner: DaemonRunner, broken: Exception | None) -> None:
    """It raises, or returns what cannot be sent."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    async def fail(request: ExampleRequest) -> Any:
        if broken is not None:
            raise broken
        return object()

    async with client_of(runner) as client:
        client.serve(ExampleRequest, fail)
        with pytest.raises(ForgedError, match="handler of ExampleRequest failed") as failed:
            await ask(runner)[1]
        assert await client.ping() >= 0
    assert failed.value.code == "handler_broken"
    assert [type(context["exception"]) for context in reported] == [type(broken) if broken else TypeError]


async def test_reply_larger_than_a_frame_is_an_error_only_at_the_daemon(runner: DaemonRunner) -> None:
    async def reply_too_large(request: ExampleRequest) -> str:
        return "x" * (5 << 20)

    async with client_of(runner) as client:
        client.serve(ExampleRequest, reply_too_large)
        with pytest.raises(ForgedError, match="bytes"):
            await ask(runner)[1]
        assert client.connected


async def test_handler_is_stopped_when_the_daemons_deadline_passes(runner: DaemonRunner) -> None:
    stopped = asyncio.Event()

    async def forever(request: ExampleRequest) -> str:
        try:
            return await never_reply(request)
        finally:
            stopped.set()

    async with client_of(runner) as client:
        client.serve(ExampleRequest, forever)
        with pytest.raises(Unavailable) as late:
            await ask(runner, timeout_s=0.02)[1]
        await stopped.wait()
    assert late.value.code == "deadline_exceeded"


async def test_request_cancelled_by_the_daemon_is_stopped(runner: DaemonRunner) -> None:
    begun = asyncio.Event()

    async def forever(request: ExampleRequest) -> str:
        begun.set()
        return await never_reply(request)

    async with client_of(runner) as client:
        client.serve(ExampleRequest, forever)
        number, answer = ask(runner)
        await begun.wait()
        session_of(runner).send(Cancel(number))
        session_of(runner).send(Cancel(number + 1))
        with pytest.raises(Unavailable, match="cancelled"):
            await answer
        assert client.connected


async def test_requests_beyond_the_limit_are_refused(runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_requests, "HANDLERS_RUNNING_MAX", 2)
    async with client_of(runner) as client:
        client.serve(ExampleRequest, never_reply)
        ask(runner)
        ask(runner)
        with pytest.raises(Unavailable, match="already handles 2 requests"):
            await ask(runner)[1]


async def test_repeated_request_in_progress_is_answered_once(runner: DaemonRunner) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()
    asked: list[ExampleRequest] = []

    async def think(request: ExampleRequest) -> str:
        asked.append(request)
        begun.set()
        await goes_on.wait()
        return await ponder(request)

    async with client_of(runner) as client:
        client.serve(ExampleRequest, think)
        number, answer = ask(runner)
        await begun.wait()
        session_of(runner).send(session_of(runner).calls.message(number))
        # Signed for behind the second one, so that has come.
        assert await client.ping() >= 0
        goes_on.set()
        assert await answer == "life is short"
        assert await client.ping() >= 0
    assert len(asked) == 1


async def test_handler_continues_without_the_daemon_and_ends_with_the_client(runner: DaemonRunner) -> None:
    begun, goes_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work(request: ExampleRequest) -> str:
        begun.set()
        try:
            await goes_on.wait()
            return await never_reply(request)
        finally:
            ended.set()

    async with client_of(runner) as client:
        client.serve(ExampleRequest, work)
        _, answer = ask(runner)
        await begun.wait()
        await runner.reopen()
        await client.ping()
        goes_on.set()
        assert not ended.is_set()
        with pytest.raises(Unavailable):
            await answer
    assert ended.is_set()


async def test_daemon_and_client_send_requests_with_equal_numbers_concurrently(runner: DaemonRunner) -> None:
    """On one connection, with numbers that are the same."""

    async def ask_back(request: ExampleRequest, client: ForgedClient) -> str:
        return f"{request.about} of {(await client.status()).pid}"

    async with client_of(runner) as client:
        client.serve(ExampleRequest, lambda request: ask_back(request, client))
        answers = await asyncio.gather(*(ask(runner)[1] for _ in range(20)), client.ping())
        pid = (await client.status()).pid
    assert answers[:20] == [f"life of {pid}"] * 20
