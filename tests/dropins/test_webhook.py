from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Record
from plugins import webhook
from plugins.webhook import Verdict
from tests.dropins.dropin_fixture import VIEWER, Blob, LoadedPlugin, Rare, refusal, running_plugin
from tests.dropins.webhook_receiver import SECRET, Body, WebhookReceiver, listening, raw_server
from tests.faulty_store import FaultyStore
from tests.kernel_fixture import Add
from tests.net.recording_connections import Certificates

HOUR_S = 3600.0
NOBODY = "http://127.0.0.1:1/hook"

RunPlugin = Callable[..., AbstractAsyncContextManager[LoadedPlugin]]
Answer = int | Callable[[], web.Response]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    return path


@pytest.fixture
async def receiver() -> AsyncIterator[WebhookReceiver]:
    async with listening(WebhookReceiver()) as made:
        yield made


@pytest.fixture
def run_plugin(secret: Path, tmp_path: Path) -> RunPlugin:
    def run_plugin(url: str, store: FaultyStore | None = None, facts_max: int = 50_000, **settings: Any) -> Any:
        given = {"url": url, "secret_file": str(secret)} | settings
        return running_plugin("webhook", webhook, given, tmp_path, store=store, facts_max=facts_max)

    return run_plugin


@pytest.fixture
def refused(secret: Path, tmp_path: Path) -> Callable[..., str]:
    def refused(**settings: Any) -> str:
        given = {"url": "https://hooks.example/a", "secret_file": str(secret)} | settings
        return refusal("webhook", webhook, given, tmp_path)

    return refused


def records(*facts: Blob) -> list[Record]:
    return [Record.of(fact, fact_id=number, at=1.5) for number, fact in enumerate(facts, 1)]


def contains(number: int, *, status: int) -> Callable[[Body], int]:
    """Answer with this status if a fact in the body has this value, else 200."""
    return lambda body: status if any(fact["fact"].get("value") == number for fact in body["facts"]) else 200


def one_after_the_other(*answers: Answer) -> Callable[[Body], int | web.Response]:
    """Return each answer once, and repeat the last one."""
    left = list(answers)

    def judge(body: Body) -> int | web.Response:
        answer = left.pop(0) if len(left) > 1 else left[0]
        return answer if isinstance(answer, int) else answer()

    return judge


# What answers mean.


@pytest.mark.parametrize(
    ("verdict", "statuses"),
    [
        (Verdict.DELIVERED, [200, 201, 202, 204, 299]),
        (Verdict.LATER, [408, 425, 429, 500, 502, 503, 504, 507, 599]),
        (Verdict.REFUSED, [400, 409, 413, 422]),
        (Verdict.MISCONFIGURED, [301, 302, 304, 307, 308, 401, 403, 404, 405, 407, 410, 411, 415, 418, 451, 999]),
    ],
)
def test_only_statuses_that_reject_the_body_can_drop_a_fact(verdict: Verdict, statuses: list[int]) -> None:
    assert {webhook.judge(status) for status in statuses} == {verdict}


NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "wanted_s"),
    [
        (None, 0.0),
        ("", 0.0),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("999999999999999999999", HOUR_S),
        ("-5", 0.0),
        ("1.5", 0.0),
        ("soon", 0.0),
        ("٣", 0.0),
        (format_datetime(NOW.replace(minute=2), usegmt=True), 120.0),
        (format_datetime(NOW.replace(hour=11), usegmt=True), 0.0),
        (format_datetime(NOW.replace(year=2099), usegmt=True), HOUR_S),
        ("Fri, 01 May 2026 12:01:00 -0000", 60.0),
        ("Fri, 99 May 2026 12:01:00 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date_up_to_an_hour(header: str | None, wanted_s: float) -> None:
    assert webhook.retry_after_s(header, NOW.timestamp()) == wanted_s


@given(st.text())
def test_any_retry_after_text_gives_a_bounded_pause(header: str) -> None:
    assert 0.0 <= webhook.retry_after_s(header, NOW.timestamp()) <= HOUR_S


# Bodies.


@given(st.lists(st.binary(max_size=600), min_size=1, max_size=30), st.integers(4096, 6000))
def test_bodies_contain_all_facts_in_order_within_the_limit(blobs: list[bytes], bytes_max: int) -> None:
    rest, told = records(*map(Blob, blobs)), []
    while rest:
        parcel = webhook.pack("h", rest, bytes_max)
        assert len(parcel.body) <= bytes_max
        facts = json.loads(parcel.body)["facts"]
        assert (parcel.first, parcel.last, parcel.count) == (facts[0]["id"], facts[-1]["id"], len(facts))
        told += [fact["fact"]["value"] for fact in facts]
        rest = rest[parcel.count :]
    assert told == [blob.hex() for blob in blobs]


def test_fact_over_the_body_limit_is_sent_without_its_fields() -> None:
    parcel = webhook.pack("h", records(Blob("x" * 10_000), Blob("small")), 4096)
    [fact] = json.loads(parcel.body)["facts"]
    assert len(parcel.body) < 4096
    assert (fact["id"], fact["type"], fact["fact"]) == (1, "Blob", None)
    assert fact["omitted_bytes"] > 10_000


def test_body_can_be_limited_to_an_end_fact() -> None:
    facts = records(*map(Blob, range(9)))
    assert webhook.pack("h", facts, 1 << 20, end=4).key == "h-1-4"


def test_signature_covers_time_and_body() -> None:
    # As openssl has it: printf '12.body' | openssl dgst -sha256 -hmac key
    digest = "207315d59098aa7f7eda7f2b5ea2bb7fde0990a5248266262dc02564b4a4efe7"
    assert webhook.sign(b"key", 12, b"body") == f"t=12,v1={digest}"


# Settings.


def test_url_and_secret_are_sufficient_settings(refused: Callable[..., str]) -> None:
    assert refused() == ""


def test_all_invalid_settings_are_reported_at_once(refused: Callable[..., str], tmp_path: Path) -> None:
    reason = refused(url="ftp://x", proxy="nonsense", secret_file=str(tmp_path / "none"), ca_file=str(tmp_path / "no"))
    for key in ("url", "proxy", "secret_file", "ca_file"):
        assert f"plugins.webhook.{key} must be " in reason


@pytest.mark.parametrize(
    "settings",
    [
        {"url": 7},
        {"batch_max": 0},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"attempts_max": "many"},
        {"body_bytes_max": 10},
        {"types": "WorkerFailed"},
        {"secret": "in the settings"},
    ],
)
def test_invalid_setting_is_refused_by_key(refused: Callable[..., str], settings: dict[str, Any]) -> None:
    assert f"plugins.webhook.{next(iter(settings))}" in refused(**settings)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.example",
        "https://",
        "https:///path",
        "file:///etc/passwd",
        "https://host:99999/",
        "https://host:0/",
        "https://[::1/",
        "https://ho st/",
        "https://host/\r\nX-Evil: 1",
        "https://a..b/",
        "https://user:password@host/",
        "https://host/#part",
        "http://hooks.example/",
        "http://10.0.0.7/",
        "http://localhost.example/",
    ],
)
def test_invalid_or_unsafe_url_is_refused(refused: Callable[..., str], url: str) -> None:
    reason = refused(url=url)
    assert "plugins.webhook.url must be " in reason
    assert "user:password" not in reason


@pytest.mark.parametrize(
    "url", ["http://localhost:80/", "http://127.8.9.1/", "http://[::1]:5/", "https://bücher.example/"]
)
def test_plain_http_is_accepted_for_loopback(refused: Callable[..., str], url: str) -> None:
    assert refused(url=url) == ""


def test_plain_http_to_remote_hosts_needs_a_setting(refused: Callable[..., str]) -> None:
    assert refused(url="http://hooks.example/", plain_http=True) == ""


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_secret_accessible_to_other_users_is_refused_with_a_fix(
    refused: Callable[..., str], secret: Path, mode: int
) -> None:
    secret.chmod(mode)
    assert f"chmod go= {secret}" in refused()


@pytest.mark.parametrize(("content", "reason"), [(b"", "not empty"), (b" \n\n", "not empty"), (b"x" * 5000, "at most")])
def test_invalid_secret_is_refused(refused: Callable[..., str], secret: Path, content: bytes, reason: str) -> None:
    secret.write_bytes(content)
    assert reason in refused()


def test_directory_or_pipe_as_secret_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "a file with the secret" in refused(secret_file=str(tmp_path / "pipe"))
    assert "plugins.webhook.secret_file" in refused(secret_file=str(tmp_path))


def test_invalid_ca_file_is_refused(refused: Callable[..., str], secret: Path) -> None:
    assert "in PEM" in refused(ca_file=str(secret))


# Delivery.


async def test_facts_are_posted_signed_and_in_order_with_history_and_id(
    run_plugin: RunPlugin, receiver: WebhookReceiver
) -> None:
    async with run_plugin(receiver.url) as plugin:
        ids = await plugin.publish(Blob(b"\x00\xff"), Blob(float("nan")), Blob({1: "ü"}), job="a")
        await plugin.caught_up()
        [delivery] = receiver.deliveries
        history = plugin.kernel.store.history
    first = delivery.body["facts"][0]
    assert delivery.signed
    assert delivery.body["history"] == history
    assert delivery.ids == ids
    assert [fact["fact"]["value"] for fact in delivery.body["facts"]] == ["00ff", None, {"1": "ü"}]
    assert {key: first[key] for key in ("type", "job", "origin")} == {"type": "Blob", "job": "a", "origin": "a test"}
    assert set(first) == {"id", "at", "type", "job", "generation", "cause", "origin", "fact"}
    assert delivery.headers["Forged-Delivery"] == f"{history}-{ids[0]}-{ids[-1]}"
    assert delivery.headers["Content-Type"] == "application/json"
    assert delivery.headers["User-Agent"].startswith("forged/")


async def test_only_facts_of_the_selected_types_and_jobs_are_posted(
    run_plugin: RunPlugin, receiver: WebhookReceiver
) -> None:
    async with run_plugin(receiver.url, types=["Rare"], jobs=["a"]) as plugin:
        await plugin.publish(Blob(1), Rare(1), job="a")
        await plugin.publish(Rare(2), job="b")
        await plugin.publish(Rare(3), job="a")
        await plugin.caught_up()
    assert [fact["fact"]["number"] for one in receiver.deliveries for fact in one.body["facts"]] == [1, 3]


async def test_unknown_fact_type_is_warned_of_and_accepted(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    async with run_plugin(receiver.url, types=["Rare", "WorkerFialed"]) as plugin:
        await plugin.publish(Blob(1), Rare(1))
        await plugin.caught_up()
        assert plugin.log.said("warning") == ["no fact types of these names"]
    assert [fact["type"] for one in receiver.deliveries for fact in one.body["facts"]] == ["Rare"]


async def test_receiver_outage_of_an_hour_loses_nothing_and_pauses_grow(
    run_plugin: RunPlugin,
) -> None:
    async with listening(WebhookReceiver()) as reserved:
        port = int(reserved.url.rpartition(":")[2].partition("/")[0])
    async with run_plugin(reserved.url) as plugin:
        began, over = plugin.clock.now, asyncio.Event()
        plugin.on_pause = lambda: over.set() if plugin.clock.now - began >= HOUR_S else None
        ids = [*await plugin.publish(Blob(0)), *await plugin.publish(*map(Blob, range(1, 250)))]
        assert "127.0.0.1" in await plugin.stalled()
        await over.wait()
        assert plugin.view.state == "active"
        assert plugin.view.failed == 0
        assert len(plugin.pauses) < HOUR_S / 20
        assert plugin.log.said("warning") == ["the receiver accepts no facts"]
        async with listening(WebhookReceiver(), port=port) as receiver:
            await plugin.caught_up()
            assert receiver.accepted_ids == ids
        assert plugin.log.said("info") == ["the receiver accepts facts again"]


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
async def test_temporarily_refused_body_is_posted_again_unchanged(
    run_plugin: RunPlugin, receiver: WebhookReceiver, status: int
) -> None:
    receiver.judge = one_after_the_other(status, status, 200)
    async with run_plugin(receiver.url) as plugin:
        ids = await plugin.publish(Blob(1), Blob(2))
        await plugin.stalled()
        # What comes meanwhile goes into the next one, so that the same key is the same body.
        ids += await plugin.publish(Blob(3))
        await plugin.caught_up()
    first, second, third, rest = receiver.deliveries
    assert first.raw == second.raw == third.raw
    assert len({one.headers["Forged-Delivery"] for one in (first, second, third)}) == 1
    assert receiver.accepted_ids == ids
    assert rest.ids == ids[2:]


async def test_retry_after_of_the_receiver_is_respected(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    asked = partial(web.Response, status=429, headers={"Retry-After": "600"})
    receiver.judge = one_after_the_other(asked, 200)
    async with run_plugin(receiver.url) as plugin:
        began = plugin.clock.now
        await plugin.publish(Blob(1))
        await receiver.until(lambda: len(receiver.deliveries) == 2)
        assert 600 <= plugin.clock.now - began < 600 + 31
        await plugin.caught_up()


@pytest.mark.parametrize("status", [301, 302, 307, 401, 403, 404, 405, 410])
async def test_misconfiguration_is_shown_retried_rarely_and_loses_nothing(
    run_plugin: RunPlugin, receiver: WebhookReceiver, status: int
) -> None:
    answer = partial(web.Response, status=status, text="no\x1b[31m way", headers={"Location": "https://else.where/"})
    receiver.judge = one_after_the_other(*[answer] * 20, 200)
    async with run_plugin(receiver.url) as plugin:
        began = plugin.clock.now
        ids = await plugin.publish(Blob(1))
        reason = await plugin.stalled()
        assert f"{status}" in reason
        assert "https://else.where/" in reason
        assert "no [31m way" in reason
        assert "/hook" not in reason
        await plugin.caught_up()
        assert plugin.clock.now - began >= 19 * webhook.MISCONFIGURED_PAUSE_S
        assert plugin.view.failed == 0
    assert receiver.accepted_ids == ids


async def test_a_redirect_is_not_followed(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    async with listening(WebhookReceiver()) as elsewhere:
        receiver.judge = lambda body: web.Response(status=307, headers={"Location": elsewhere.url})
        async with run_plugin(receiver.url) as plugin:
            await plugin.publish(Blob(1))
            assert elsewhere.url in await plugin.stalled()
        assert elsewhere.deliveries == []


@pytest.mark.parametrize("status", [400, 409, 413, 422])
async def test_refused_fact_is_isolated_and_skipped(
    run_plugin: RunPlugin, receiver: WebhookReceiver, status: int
) -> None:
    receiver.judge = contains(37, status=status)
    async with run_plugin(receiver.url) as plugin:
        ids = await plugin.publish(*map(Blob, range(64)))
        await plugin.caught_up()
        ids += await plugin.publish(Blob("after"))
        await plugin.caught_up()
        said = await plugin.run("status")
        assert plugin.log.said("error") == ["a fact that the receiver refuses was skipped"]
        assert [fields["first"] for level, _, fields in plugin.log.events if level == "error"] == [ids[37]]
        assert plugin.view.failed == 0
    assert receiver.accepted_ids == ids[:37] + ids[38:]
    assert (said["left_out"], said["delivered"], said["last_error"]) == (1, 64, None)
    attempts = [one for one in receiver.deliveries if one.status == status]
    assert len(attempts) <= 5 + 6


async def test_only_the_refused_facts_of_a_batch_are_skipped(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    poison = {0, 5, 6, 31}
    receiver.judge = lambda body: 422 if any(fact["fact"]["value"] in poison for fact in body["facts"]) else 200
    async with run_plugin(receiver.url, attempts_max=1) as plugin:
        ids = await plugin.publish(*map(Blob, range(32)))
        await plugin.caught_up()
        assert (await plugin.run("status"))["left_out"] == 4
    assert receiver.accepted_ids == [one for number, one in enumerate(ids) if number not in poison]


async def test_receiver_that_refuses_large_bodies_gets_smaller_ones(
    run_plugin: RunPlugin, receiver: WebhookReceiver
) -> None:
    receiver.judge = lambda body: 413 if len(body["facts"]) > 3 else 200
    async with run_plugin(receiver.url) as plugin:
        ids = await plugin.publish(*map(Blob, range(40)))
        await plugin.caught_up()
        assert (await plugin.run("status"))["left_out"] == 0
    assert receiver.accepted_ids == ids


async def test_receiver_that_refuses_everything_drops_facts_slowly(
    run_plugin: RunPlugin, receiver: WebhookReceiver
) -> None:
    """Each fact that is left out was refused `attempts_max` times, with pauses in between."""
    async with run_plugin(receiver.url, attempts_max=5) as plugin:
        receiver.judge = lambda body: 400 if len(plugin.log.said("error")) < 4 else 200
        ids = await plugin.publish(*map(Blob, range(8)))
        await plugin.caught_up()
        assert (await plugin.run("status"))["left_out"] == 4
        assert len(plugin.pauses) == 4 * 4
    assert receiver.accepted_ids == ids[4:]


async def test_search_for_a_refused_fact_continues_after_an_outage(
    run_plugin: RunPlugin, receiver: WebhookReceiver
) -> None:
    poison = contains(3, status=400)
    answers = iter([None, 503, None, 503, None, 503])
    receiver.judge = lambda body: next(answers, None) or poison(body)
    async with run_plugin(receiver.url, attempts_max=1) as plugin:
        ids = await plugin.publish(*map(Blob, range(8)))
        await plugin.caught_up()
    assert sorted(set(receiver.accepted_ids)) == [one for number, one in enumerate(ids) if number != 3]


async def test_large_facts_are_split_into_small_bodies(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    async with run_plugin(receiver.url, body_bytes_max=300_000) as plugin:
        ids = await plugin.publish(*(Blob(bytes([number]) * 60_000) for number in range(20)))
        await plugin.caught_up()
    assert receiver.accepted_ids == ids
    assert len(receiver.deliveries) == 10
    assert max(len(one.raw) for one in receiver.deliveries) <= 300_000


async def test_large_bodies_are_posted_if_allowed(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    async with run_plugin(receiver.url, body_bytes_max=1 << 26) as plugin:
        ids = await plugin.publish(*(Blob("x" * 60_000) for _ in range(60)))
        await plugin.caught_up()
    assert receiver.accepted_ids == ids
    assert len(receiver.deliveries[0].raw) > 2 << 20


async def test_a_gap_is_posted_in_its_place(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    store = FaultyStore()
    async with run_plugin(NOBODY, store, facts_max=10) as plugin:
        await plugin.publish(Blob(0))
        await plugin.stalled()
        await plugin.publish(*map(Blob, range(1, 30)))
        history = plugin.kernel.store.history
    async with run_plugin(receiver.url, store, facts_max=10) as plugin:
        await plugin.caught_up()
        assert (await plugin.run("status"))["gaps"] == 1
    gap, facts = receiver.deliveries[0], receiver.deliveries[1:]
    assert gap.body["facts"] == []
    assert gap.body["gap"]["last"] + 1 == facts[0].ids[0]
    assert "journal" in gap.body["gap"]["reason"]
    assert gap.signed
    assert gap.headers["Forged-Delivery"] == f"{history}-{gap.body['gap']['first']}-{gap.body['gap']['last']}-gap"


async def test_failed_gap_is_posted_again(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    receiver.judge = one_after_the_other(503, 503, 200)
    async with run_plugin(NOBODY, store := FaultyStore(), facts_max=10) as plugin:
        await plugin.publish(Blob(0))
        await plugin.stalled()
        await plugin.publish(*map(Blob, range(1, 30)))
    async with run_plugin(receiver.url, store, facts_max=10) as plugin:
        await plugin.caught_up()
    assert [bool(one.body.get("gap")) for one in receiver.deliveries] == [True, True, True, False]


async def test_refused_gap_does_not_stop_delivery(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    receiver.judge = lambda body: 422 if "gap" in body else 200
    async with run_plugin(NOBODY, store := FaultyStore(), facts_max=10) as plugin:
        await plugin.publish(Blob(0))
        await plugin.stalled()
        await plugin.publish(*map(Blob, range(1, 30)))
    async with run_plugin(receiver.url, store, facts_max=10) as plugin:
        await plugin.caught_up()
        assert (await plugin.run("status"))["left_out"] == 1
    assert len(receiver.accepted_ids) == 10


async def test_the_queue_survives_a_restart_and_goes_on_in_order(
    run_plugin: RunPlugin, receiver: WebhookReceiver
) -> None:
    store = FaultyStore()
    async with run_plugin(receiver.url, store) as plugin:
        ids = await plugin.publish(Blob(0))
        await plugin.caught_up()
        receiver.judge = lambda body: 503
        ids += await plugin.publish(*map(Blob, range(1, 5)))
        await plugin.stalled()
    receiver.judge = lambda body: 200
    async with run_plugin(receiver.url, store) as plugin:
        ids += await plugin.publish(Blob(5))
        await plugin.caught_up()
    assert list(dict.fromkeys(receiver.accepted_ids)) == ids


# Receivers that behave badly.


async def test_silent_receiver_times_out_without_blocking_the_daemon(run_plugin: RunPlugin) -> None:
    silent = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.set()
        await asyncio.Event().wait()

    async with raw_server(say_nothing) as url, run_plugin(url, timeout_s=0.05) as plugin:
        await plugin.publish(Blob(1))
        await silent.wait()
        assert await plugin.kernel.bus.ask(Add(2)) == 2
        assert "no answer in 0.05 s" in await plugin.stalled()
        assert plugin.view.failed == 0


async def test_endless_error_response_times_out(run_plugin: RunPlugin) -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 Oh\r\nContent-Length: 1000\r\n\r\nx")
        await asyncio.Event().wait()

    async with raw_server(trickle) as url, run_plugin(url, timeout_s=0.05) as plugin:
        await plugin.publish(Blob(1))
        assert "no answer in 0.05 s" in await plugin.stalled()


async def test_error_response_is_read_only_as_far_as_it_is_shown(
    run_plugin: RunPlugin, receiver: WebhookReceiver
) -> None:
    receiver.judge = lambda body: web.Response(status=500, body=b"x" * (8 << 20))
    async with run_plugin(receiver.url) as plugin:
        await plugin.publish(Blob(1))
        assert len(await plugin.stalled()) < 2 * webhook.SHOWN_CHARS_MAX


async def test_success_status_counts_without_a_complete_response(run_plugin: RunPlugin) -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx")
        await asyncio.Event().wait()

    async with raw_server(trickle) as url, run_plugin(url) as plugin:
        await plugin.publish(Blob(1))
        await plugin.caught_up()
        assert (await plugin.run("status"))["delivered"] == 1


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 20",
        b"HTTP/1.1 500 Oh\r\nContent-Le",
        b"\x00\x01\x02\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 99_999,
    ],
)
async def test_truncated_or_invalid_response_is_a_failed_delivery(run_plugin: RunPlugin, said: bytes) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()

    async with raw_server(say) as url, run_plugin(url) as plugin:
        await plugin.publish(Blob(1))
        await plugin.stalled()
        assert (await plugin.run("status"))["delivered"] == 0
        assert plugin.view.failed == 0


async def test_truncated_error_response_is_judged_by_its_status(run_plugin: RunPlugin) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not here\r\nContent-Length: 1000\r\n\r\nhalf of")
        await writer.drain()

    async with raw_server(die) as url, run_plugin(url) as plugin:
        await plugin.publish(Blob(1))
        assert "it responds with 404: half of" in await plugin.stalled()


# TLS.


def certificates(tmp_path: Path, *names: str) -> tuple[ssl.SSLContext, str]:
    authority = Certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(*names))
    return context, str(authority.ca)


async def test_https_is_verified_against_the_configured_ca(run_plugin: RunPlugin, tmp_path: Path) -> None:
    tls, ca = certificates(tmp_path, "127.0.0.1")
    async with listening(WebhookReceiver(), tls=tls) as receiver, run_plugin(receiver.url, ca_file=ca) as plugin:
        ids = await plugin.publish(Blob(1))
        await plugin.caught_up()
        assert receiver.accepted_ids == ids


async def test_receiver_with_a_certificate_of_an_unknown_ca_gets_nothing(run_plugin: RunPlugin, tmp_path: Path) -> None:
    tls, _ = certificates(tmp_path, "127.0.0.1")
    async with listening(WebhookReceiver(), tls=tls) as receiver, run_plugin(receiver.url) as plugin:
        await plugin.publish(Blob(1))
        assert "its certificate is not accepted" in await plugin.stalled()
        assert receiver.deliveries == []


async def test_receiver_with_a_certificate_for_another_host_gets_nothing(run_plugin: RunPlugin, tmp_path: Path) -> None:
    tls, ca = certificates(tmp_path, "another.example")
    async with listening(WebhookReceiver(), tls=tls) as receiver, run_plugin(receiver.url, ca_file=ca) as plugin:
        await plugin.publish(Blob(1))
        assert "IP address mismatch" in await plugin.stalled()
        assert receiver.deliveries == []


async def test_receiver_with_a_self_signed_certificate_gets_nothing(run_plugin: RunPlugin, tmp_path: Path) -> None:
    context, authority, pem = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), trustme.CA(), tmp_path / "self.pem"
    pem.write_bytes(authority.private_key_pem.bytes() + authority.cert_pem.bytes())
    context.load_cert_chain(pem)
    async with listening(WebhookReceiver(), tls=context) as receiver, run_plugin(receiver.url) as plugin:
        await plugin.publish(Blob(1))
        assert "self-signed" in await plugin.stalled()
        assert receiver.deliveries == []


# The way there.


async def test_proxy_in_the_environment_is_ignored(
    run_plugin: RunPlugin, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/")
    async with run_plugin(receiver.url) as plugin:
        await plugin.publish(Blob(1))
        await plugin.caught_up()
    assert len(receiver.accepted_ids) == 1


async def test_proxy_in_the_settings_is_used(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    proxy = receiver.url.removesuffix("/hook")
    async with run_plugin("http://nowhere.invalid/hook", proxy=proxy, plain_http=True) as plugin:
        await plugin.publish(Blob(1))
        await plugin.caught_up()
    assert len(receiver.accepted_ids) == 1


# Commands.


async def test_status_shows_the_last_delivered_fact(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    receiver.judge = one_after_the_other(200, 503)
    async with run_plugin(receiver.url) as plugin:
        [first] = await plugin.publish(Blob(1))
        await plugin.caught_up()
        await plugin.publish(Blob(2), Blob(3))
        await plugin.stalled()
        said = await plugin.run("status", VIEWER)
        assert (said["position"], said["behind"], said["delivered"], said["deliveries"]) == (first, 2, 1, 1)
        assert said["last_status"] == 503
        assert "it responds with 503" in said["last_error"]
        assert said["receiver"] in receiver.url
        assert "/hook" not in str(said)


async def test_test_command_posts_an_empty_delivery_and_shows_the_response(
    run_plugin: RunPlugin, receiver: WebhookReceiver
) -> None:
    async with run_plugin(receiver.url) as plugin:
        said = await plugin.run("test")
        assert (said["accepted"], said["status"]) == (True, 200)
        receiver.judge = lambda body: web.Response(status=403, text="unknown sender")
        said = await plugin.run("test")
        assert (said["accepted"], said["status"], said["answer"]) == (False, 403, "unknown sender")
    ping = receiver.deliveries[0]
    assert ping.signed
    assert (ping.body["facts"], ping.body["ping"]) == ([], True)


async def test_successful_test_command_ends_a_long_pause(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    receiver.judge = one_after_the_other(partial(web.Response, status=503, headers={"Retry-After": "3600"}), 200)
    async with run_plugin(receiver.url) as plugin:
        began = plugin.clock.now
        plugin.on_pause = lambda: None
        await plugin.publish(Blob(1))
        await plugin.stalled()
        await plugin.run("test")
        await plugin.caught_up()
        assert plugin.clock.now - began < 100


async def test_test_command_for_an_absent_receiver_is_no_plugin_failure(run_plugin: RunPlugin) -> None:
    async with run_plugin(NOBODY) as plugin:
        with pytest.raises(Unavailable, match=NOBODY.removesuffix("/hook")):
            await plugin.run("test")
        assert plugin.view.failed == 0


async def test_viewer_may_read_status_but_not_post(run_plugin: RunPlugin, receiver: WebhookReceiver) -> None:
    async with run_plugin(receiver.url) as plugin:
        with pytest.raises(RequestRefused, match="viewer"):
            await plugin.run("test", VIEWER)
    assert receiver.deliveries == []


async def test_stop_closes_the_connection_and_the_next_daemon_posts_the_rest(
    run_plugin: RunPlugin, receiver: WebhookReceiver
) -> None:
    store = FaultyStore()
    async with run_plugin(receiver.url, store) as plugin:
        ids = await plugin.publish(Blob(1))
        await plugin.caught_up()
        await plugin.host.stop()
        ids += await plugin.publish(Blob(2))
        assert "the daemon is stopping" in await plugin.stalled()
    assert receiver.accepted_ids == ids[:1]
    async with run_plugin(receiver.url, store) as plugin:
        await plugin.caught_up()
    assert list(dict.fromkeys(receiver.accepted_ids)) == ids
