from __future__ import annotations

from typing import Any

import msgspec
import pytest

from forged.auth.access import AccessPolicy
from forged.auth.messages import (
    REQUESTS,
    CreateToken,
    ListTokens,
    RevokeToken,
    TokenCreated,
    TokenPage,
    TokenRevoked,
    TokenView,
)
from forged.auth.model import Principal, Role
from forged.auth.service import PREFIX, TokenService
from forged.auth.tokens import JOB_CHARS_MAX, JOBS_PER_TOKEN_MAX, SECRET_BYTES_MAX, SECRET_BYTES_MIN, encode_token
from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Call
from forged.net.transport.port import Peer
from forged.pagination import PAGE_BYTES_MAX
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import Kernel, call, on_virtual_time, running

SECRET = bytes(range(32))
TEXT = encode_token(SECRET)[1]
REMOTE_PEER = Peer("tcp", "192.0.2.1:5")


class RunningTokenService:
    """The token service, and the number of `rights_changed` calls."""

    service: TokenService

    def __init__(self) -> None:
        self.changes = 0

    def register(self, kernel: Kernel) -> None:
        self.service = TokenService(kernel.bus, kernel.clock, AccessPolicy(daemon_uid=1000), self._count_change)
        kernel.ledger.register(self.service)

    def authenticate(self, text: str = TEXT) -> Principal | str:
        """The principal of a remote peer with this token, or the error code."""
        try:
            return self.service.identify(REMOTE_PEER, text)
        except RequestRefused as error:
            return error.code

    def _count_change(self) -> None:
        self.changes += 1


def create(**more: Any) -> CreateToken:
    return CreateToken(**{"name": "laptop", "role": Role.WORKER, "secret": SECRET} | more)


@on_virtual_time
async def test_token_text_authenticates_after_the_token_is_created() -> None:
    access = RunningTokenService()
    async with running(register=access.register, requests=REQUESTS) as kernel:
        assert access.authenticate() == "token_unknown"
        view = await kernel.bus.ask(create(jobs=("a",)))
        assert access.authenticate() == Principal("laptop", Role.WORKER, frozenset({"a"}))
        assert kernel.facts() == [TokenCreated(view.token_id, "laptop", Role.WORKER, ("a",))]
        assert await kernel.bus.ask(ListTokens()) == TokenPage([view], more=False)


@on_virtual_time
async def test_revocation_takes_effect_and_notifies_sessions_when_durable() -> None:
    access, store = RunningTokenService(), FaultyStore()
    async with running(store, access.register) as kernel:
        view = await kernel.bus.ask(create())
        store.block()
        pending = kernel.bus.submit(RevokeToken(view.token_id), call())
        await store.entered.wait()
        assert access.changes == 0
        store.unblock()
        assert (await pending.wait()).revoked_at is not None
        await kernel.settle()
        assert (access.changes, access.authenticate()) == (1, "token_revoked")
        assert kernel.facts(TokenRevoked) == [TokenRevoked(view.token_id, "laptop")]


@on_virtual_time
async def test_revoking_twice_changes_nothing() -> None:
    access = RunningTokenService()
    async with running(register=access.register) as kernel:
        view = await kernel.bus.ask(create())
        first = await kernel.bus.ask(RevokeToken(view.token_id))
        assert await kernel.bus.ask(RevokeToken(view.token_id)) == first
        assert len(kernel.facts(TokenRevoked)) == 1


@on_virtual_time
async def test_revoking_a_missing_token_is_refused() -> None:
    async with running(register=RunningTokenService().register) as kernel:
        with pytest.raises(RequestRefused) as caught:
            await kernel.bus.ask(RevokeToken("unknown"))
        assert caught.value.code == "token_not_found"


@on_virtual_time
async def test_tokens_and_revocations_survive_a_restart() -> None:
    access, store = RunningTokenService(), FaultyStore()
    async with running(store, access.register) as kernel:
        await kernel.bus.ask(create())
        other = await kernel.bus.ask(create(secret=bytes(32)))
        await kernel.bus.ask(RevokeToken(other.token_id))
    async with running(store, access.register):
        assert access.authenticate() == Principal("laptop", Role.WORKER)
        assert access.authenticate(encode_token(bytes(32))[1]) == "token_revoked"


@on_virtual_time
async def test_a_token_whose_commit_failed_is_not_known() -> None:
    access, store = RunningTokenService(), FaultyStore()
    async with running(store, access.register) as kernel:
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await kernel.bus.ask(create())
        assert access.authenticate() == "token_unknown"


@on_virtual_time
async def test_token_is_accepted_until_its_revocation_is_durable_and_after_a_failed_one() -> None:
    access, store = RunningTokenService(), FaultyStore()
    async with running(store, access.register) as kernel:
        view = await kernel.bus.ask(create())
        store.block()
        pending = kernel.bus.submit(RevokeToken(view.token_id), call())
        await store.entered.wait()
        assert access.authenticate() == Principal("laptop", Role.WORKER)
        store.commit_error = full()
        store.unblock()
        with pytest.raises(Unavailable):
            await pending.wait()
        assert (access.authenticate(), access.changes) == (Principal("laptop", Role.WORKER), 0)
        store.commit_error = None
        await kernel.ledger.writable()
        await kernel.bus.ask(RevokeToken(view.token_id))
        assert access.authenticate() == "token_revoked"


@on_virtual_time
async def test_a_token_is_unknown_until_it_is_durable() -> None:
    access, store = RunningTokenService(), FaultyStore()
    async with running(store, access.register) as kernel:
        store.block()
        pending = kernel.bus.submit(create(), call())
        await store.entered.wait()
        assert access.authenticate() == "token_unknown"
        store.unblock()
        await pending.wait()
        assert isinstance(access.authenticate(), Principal)


@on_virtual_time
async def test_authentication_follows_acknowledged_changes_at_once_and_ignores_pending_ones() -> None:
    access, store = RunningTokenService(), FaultyStore()
    async with running(store, access.register) as kernel:
        store.block()
        created = kernel.bus.submit(create(), call())
        await store.entered.wait()
        seen: list[Principal | str] = []
        created.when_done(lambda _: seen.append(access.authenticate()))
        revoked = kernel.bus.submit(RevokeToken(encode_token(SECRET)[0]), call())
        revoked.when_done(lambda _: seen.append(access.authenticate()))
        store.unblock()
        await revoked.wait()
        assert seen == [Principal("laptop", Role.WORKER), "token_revoked"]


@on_virtual_time
async def test_creating_a_token_deletes_the_oldest_dead_tokens_in_the_same_decision() -> None:
    access, store = RunningTokenService(), FaultyStore()
    async with running(store, access.register) as kernel:
        access.service.tokens.dead_max = 1
        for number in range(3):
            await kernel.bus.ask(create(secret=bytes([number]) * 32, ttl_s=60.0 + number))
        kernel.clock.jump(100.0)
        view = await kernel.bus.ask(create())
        held = {encode_token(bytes([2]) * 32)[0], view.token_id}
        assert {token.token_id for token in (await kernel.bus.ask(ListTokens())).tokens} == held
        assert {entry.key.removeprefix(PREFIX) for entry in await store.list(PREFIX)} == held
        assert access.authenticate(encode_token(bytes(32))[1]) == "token_unknown"
        assert access.authenticate(encode_token(bytes([2]) * 32)[1]) == "token_expired"


@on_virtual_time
async def test_tokens_are_listed_in_consecutive_pages() -> None:
    async with running(register=RunningTokenService().register) as kernel:
        views = [await kernel.bus.ask(create(secret=bytes([number]) * 32)) for number in range(5)]
        listed: list[TokenView] = []
        sizes = []
        more = True
        while more:
            page = await kernel.bus.ask(ListTokens(listed[-1].token_id if listed else "", limit=2))
            listed += page.tokens
            sizes.append(len(page.tokens))
            more = page.more
        assert listed == sorted(views, key=lambda view: view.token_id)
        assert sizes == [2, 2, 1]


@on_virtual_time
async def test_a_page_of_tokens_fits_into_a_frame() -> None:
    jobs = tuple(f"{number:0{JOB_CHARS_MAX}}" for number in range(JOBS_PER_TOKEN_MAX))
    async with running(register=RunningTokenService().register) as kernel:
        for number in range(40):
            await kernel.bus.ask(create(secret=bytes([number]) * 32, jobs=jobs))
        page = await kernel.bus.ask(ListTokens())
        assert page.more
        assert len(msgspec.msgpack.encode(page)) < PAGE_BYTES_MAX + len(b"some framing" * 4)


@on_virtual_time
async def test_store_facts_and_replies_do_not_contain_the_secret() -> None:
    store = FaultyStore()
    async with running(store, RunningTokenService().register) as kernel:
        view = await kernel.bus.submit(create(), call(1)).wait()
        listed = await kernel.bus.ask(ListTokens())
        held = [value for batch in store.batches for one in batch for value in one.puts.values()]
        held += [msgspec.msgpack.encode(view), msgspec.msgpack.encode(listed)]
        spelled = TEXT.rsplit("_", 1)[1].encode()
        assert not any(SECRET in value or spelled in value for value in held)


@on_virtual_time
async def test_token_expires_after_its_ttl() -> None:
    access = RunningTokenService()
    async with running(register=access.register) as kernel:
        await kernel.bus.ask(create(ttl_s=60.0))
        kernel.clock.jump(59.0)
        assert isinstance(access.authenticate(), Principal)
        kernel.clock.jump(1.0)
        assert access.authenticate() == "token_expired"


@pytest.mark.parametrize(
    "more",
    [
        {"name": ""},
        {"jobs": ()},
        {"ttl_s": 0.0},
        {"ttl_s": float("nan")},
        {"secret": bytes(SECRET_BYTES_MIN - 1)},
        {"secret": bytes(SECRET_BYTES_MAX + 1)},
    ],
    ids=["name", "jobs", "ttl", "nan", "short", "long"],
)
@on_virtual_time
async def test_invalid_token_request_is_refused_and_changes_nothing(more: dict[str, Any]) -> None:
    async with running(register=RunningTokenService().register) as kernel:
        with pytest.raises(RequestRefused):
            await kernel.bus.ask(create(**more))
        assert (await kernel.bus.ask(ListTokens()), kernel.facts()) == (TokenPage([], more=False), [])


@pytest.mark.parametrize("principal", [Principal("w", Role.WORKER), Principal("o", Role.OPERATOR, frozenset({"a"}))])
@on_virtual_time
async def test_token_requests_need_an_operator_of_all_jobs(principal: Principal) -> None:
    async with running(register=RunningTokenService().register) as kernel:
        for request in (create(), ListTokens(), RevokeToken("x")):
            with pytest.raises(RequestRefused) as caught:
                await kernel.bus.ask(request, Call(principal, "a test"))
            assert caught.value.code == "forbidden"
