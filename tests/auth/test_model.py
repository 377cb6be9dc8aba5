from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.auth.model import COVERED, Principal, Role, Token

ROLES = st.sampled_from(Role)
JOBS = st.none() | st.frozensets(st.text(max_size=8), max_size=4)
TIMES = st.floats(allow_nan=False)

TOKENS = st.builds(
    Token,
    token_id=st.text(),
    name=st.text(),
    role=ROLES,
    jobs=st.none() | st.lists(st.text()).map(tuple),
    created_at=TIMES,
    expires_at=st.none() | TIMES,
    revoked_at=st.none() | TIMES,
    digest=st.binary(),
)


def token(**changes: object) -> Token:
    plain = Token(token_id="a1", name="ci", role=Role.WORKER, jobs=("a", "b"), created_at=1.0, digest=b"d")
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize(
    ("role", "covered"),
    [
        (Role.VIEWER, {Role.VIEWER}),
        (Role.WORKER, {Role.VIEWER, Role.WORKER}),
        (Role.OPERATOR, {Role.VIEWER, Role.WORKER, Role.OPERATOR}),
    ],
)
def test_role_covers_the_roles_of_the_table(role: Role, covered: set[Role]) -> None:
    assert {needed for needed in Role if role.covers(needed)} == covered


def test_every_role_is_in_the_table() -> None:
    assert set(COVERED) == set(Role)


@given(role=ROLES, needed=ROLES, job=st.none() | st.text())
def test_without_a_set_of_jobs_the_role_alone_decides(role: Role, needed: Role, job: str | None) -> None:
    assert Principal("ci", role).may(needed, job) == role.covers(needed)


@given(role=ROLES, jobs=st.frozensets(st.text(), max_size=4), needed=ROLES, job=st.text())
def test_a_set_of_jobs_bounds_every_role(role: Role, jobs: frozenset[str], needed: Role, job: str) -> None:
    assert Principal("ci", role, jobs).may(needed, job) == (role.covers(needed) and job in jobs)


@given(role=ROLES, jobs=st.frozensets(st.text()), needed=ROLES)
def test_principal_bound_to_jobs_may_not_make_daemon_wide_requests(
    role: Role, jobs: frozenset[str], needed: Role
) -> None:
    assert not Principal("ci", role, jobs).may(needed, None)


def test_empty_set_of_jobs_allows_no_job() -> None:
    assert not Principal("ci", Role.OPERATOR, frozenset()).may(Role.VIEWER, "a")


def test_a_token_s_principal_has_its_name_role_and_jobs() -> None:
    assert token().principal == Principal("ci", Role.WORKER, frozenset({"a", "b"}))


def test_the_principal_of_a_token_for_all_jobs_has_all_jobs() -> None:
    assert token(jobs=None).principal.jobs is None


@pytest.mark.parametrize(("now", "expired"), [(9.0, False), (10.0, True), (11.0, True)])
def test_token_expires_at_its_expiry_time(now: float, expired: bool) -> None:
    assert token(expires_at=10.0).expired(now) is expired


def test_a_token_without_an_expiry_never_expires() -> None:
    assert not token().expired(1e300)


def test_a_token_is_live_until_it_is_revoked_or_expired() -> None:
    assert token(expires_at=10.0).live(9.0)
    assert not token(expires_at=10.0).live(10.0)
    assert not token(revoked_at=5.0).live(9.0)


@given(stored=TOKENS)
def test_token_survives_encoding(stored: Token) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=Token) == stored


@given(principal=st.builds(Principal, name=st.text(), role=ROLES, jobs=JOBS))
def test_principal_survives_encoding(principal: Principal) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(principal), type=Principal) == principal


@pytest.mark.parametrize("kind", [Token, Principal])
def test_tokens_and_principals_cannot_be_changed(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen
