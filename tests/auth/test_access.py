from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.auth.access import AccessPolicy, authorise, identify
from forged.auth.model import Principal, Role
from forged.auth.tokens import TokenRegistry
from forged.errors import RequestRefused
from forged.net.transport.port import Peer

NOW = 1000.0
DAEMON_UID = 990
POLICY = AccessPolicy(daemon_uid=DAEMON_UID)
BOOK = TokenRegistry()
_, VIEWER_TEXT = BOOK.issue("reader", Role.VIEWER, ("a",), None, NOW, bytes(range(32)))

ROOT = Peer("unix", "/run/forged.sock", uid=0)
USER = Peer("unix", "/run/forged.sock", uid=1000)
LOOPBACK = Peer("tcp", "127.0.0.1:4000", loopback=True, uid=1000)
OWN_LOOPBACK = Peer("tcp", "127.0.0.1:4000", loopback=True, uid=DAEMON_UID)
REMOTE = Peer("tcp", "10.0.0.7:4000")
CERTIFIED = Peer("tls", "10.0.0.7:4000", certificate_name="host-a")

PEERS = st.builds(
    Peer,
    scheme=st.sampled_from(["unix", "tcp", "tls"]),
    address=st.text(max_size=20),
    loopback=st.booleans(),
    uid=st.none() | st.integers(0, 2**32 - 1) | st.sampled_from([0, DAEMON_UID]),
    certificate_name=st.none() | st.sampled_from(["host-a", "host-b"]),
)
POLICIES = st.builds(
    AccessPolicy,
    daemon_uid=st.just(DAEMON_UID),
    unix_other_role=st.none() | st.sampled_from(Role),
    certificate_roles=st.dictionaries(st.sampled_from(["host-a", "host-b"]), st.sampled_from(Role)),
    own_user_loopback_role=st.none() | st.sampled_from(Role),
    anonymous_loopback_role=st.none() | st.sampled_from(Role),
)


def who(peer: Peer, policy: AccessPolicy = POLICY, token: str | None = None) -> Principal:
    return identify(peer, token, BOOK, policy, NOW)


def refusal(peer: Peer, policy: AccessPolicy = POLICY, token: str | None = None) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        who(peer, policy, token)
    return caught.value


def forbidden(principal: Principal, role_needed: Role, job: str | None) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        authorise(principal, role_needed, job)
    assert caught.value.code == "forbidden"
    return caught.value


@pytest.mark.parametrize("uid", [0, DAEMON_UID])
def test_root_and_the_daemon_s_own_user_are_operators_of_all_jobs(uid: int) -> None:
    assert who(Peer("unix", "/s", uid=uid)) == Principal(f"unix:{uid}", Role.OPERATOR)


def test_another_user_has_the_role_of_the_policy() -> None:
    policy = AccessPolicy(daemon_uid=DAEMON_UID, unix_other_role=Role.VIEWER)
    assert who(USER, policy) == Principal("unix:1000", Role.VIEWER)


def test_another_user_without_a_role_in_the_policy_is_refused_by_uid() -> None:
    error = refusal(USER)
    assert error.code == "token_required"
    assert "1000" in error.message


@given(policy=POLICIES, loopback=st.booleans())
def test_unix_peer_without_credentials_is_refused_under_every_policy(policy: AccessPolicy, loopback: bool) -> None:
    assert refusal(Peer("unix", "/s", loopback=loopback), policy).code == "token_required"


@given(peer=PEERS, policy=POLICIES)
def test_a_valid_token_decides_alone(peer: Peer, policy: AccessPolicy) -> None:
    assert who(peer, policy, VIEWER_TEXT) == Principal("reader", Role.VIEWER, frozenset({"a"}))


@given(peer=PEERS, policy=POLICIES, text=st.text(max_size=80))
def test_invalid_token_is_refused_for_every_peer(peer: Peer, policy: AccessPolicy, text: str) -> None:
    assert refusal(peer, policy, text).code == "token_unknown"


def test_a_revoked_or_expired_token_is_refused_even_to_root() -> None:
    book = TokenRegistry()
    token, revoked = book.issue("r", Role.OPERATOR, None, None, NOW, b"r" * 32)
    book.revoke(token.token_id, NOW)
    _, expired = book.issue("e", Role.OPERATOR, None, NOW + 1, NOW, b"e" * 32)
    for text, code in ((revoked, "token_revoked"), (expired, "token_expired")):
        with pytest.raises(RequestRefused) as caught:
            identify(ROOT, text, book, POLICY, NOW + 1)
        assert caught.value.code == code


def test_empty_token_is_invalid_rather_than_absent() -> None:
    assert refusal(ROOT, token="").code == "token_unknown"


def test_a_certificate_has_the_role_of_the_policy() -> None:
    policy = AccessPolicy(daemon_uid=DAEMON_UID, certificate_roles={"host-a": Role.OPERATOR})
    assert who(CERTIFIED, policy) == Principal("certificate:host-a", Role.OPERATOR)


def test_certificate_role_precedes_the_loopback_role() -> None:
    policy = AccessPolicy(daemon_uid=DAEMON_UID, certificate_roles={"host-a": Role.VIEWER})
    peer = Peer("tls", "127.0.0.1:4000", loopback=True, certificate_name="host-a")
    assert who(peer, policy).role is Role.VIEWER


def test_a_certificate_without_a_role_is_refused_by_name() -> None:
    error = refusal(CERTIFIED)
    assert error.code == "token_required"
    assert "'host-a'" in error.message


@pytest.mark.parametrize("name", ["stranger", ""])
def test_a_certificate_without_a_role_is_not_anonymous_on_loopback(name: str) -> None:
    error = refusal(Peer("tls", "127.0.0.1:4000", loopback=True, certificate_name=name))
    assert error.code == "token_required"
    assert f"the certificate {name!r} has no role" in error.message


def test_a_certificate_s_name_counts_only_on_tls() -> None:
    policy = AccessPolicy(daemon_uid=DAEMON_UID, certificate_roles={"host-a": Role.OPERATOR})
    assert refusal(Peer("tcp", "10.0.0.7:4000", certificate_name="host-a"), policy).code == "token_required"


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_a_uid_counts_only_on_unix(scheme: str) -> None:
    peer = Peer("tls" if scheme == "tls" else "tcp", "10.0.0.7:4000", uid=0)
    assert refusal(peer).code == "token_required"


@pytest.mark.parametrize("uid", [None, 0, 1000])
def test_loopback_client_of_another_user_is_refused_by_default(uid: int | None) -> None:
    error = refusal(Peer("tcp", "127.0.0.1:4000", loopback=True, uid=uid))
    assert error.code == "token_required"
    assert f"user {'unknown' if uid is None else uid}" in error.message


def test_loopback_client_of_the_daemon_s_own_user_is_a_worker_by_default() -> None:
    assert who(OWN_LOOPBACK) == Principal(f"loopback:{DAEMON_UID}", Role.WORKER)


def test_policy_can_refuse_the_daemon_s_own_user_on_loopback() -> None:
    policy = AccessPolicy(daemon_uid=DAEMON_UID, own_user_loopback_role=None)
    assert refusal(OWN_LOOPBACK, policy).code == "token_required"


def test_own_user_has_the_greater_of_its_role_and_the_role_of_every_user() -> None:
    policy = AccessPolicy(daemon_uid=DAEMON_UID, anonymous_loopback_role=Role.OPERATOR)
    assert who(OWN_LOOPBACK, policy).role is Role.OPERATOR
    policy = AccessPolicy(daemon_uid=DAEMON_UID, anonymous_loopback_role=Role.VIEWER)
    assert who(OWN_LOOPBACK, policy).role is Role.WORKER


def test_the_daemon_s_uid_counts_for_nothing_from_another_host() -> None:
    assert refusal(Peer("tcp", "10.0.0.7:4000", uid=DAEMON_UID)).code == "token_required"


def test_loopback_client_has_the_role_of_the_policy() -> None:
    policy = AccessPolicy(daemon_uid=DAEMON_UID, anonymous_loopback_role=Role.VIEWER)
    assert who(LOOPBACK, policy).role is Role.VIEWER


def test_policy_can_refuse_loopback_clients() -> None:
    policy = AccessPolicy(daemon_uid=DAEMON_UID, anonymous_loopback_role=None)
    assert refusal(LOOPBACK, policy).code == "token_required"


@given(policy=POLICIES)
def test_remote_client_without_token_is_refused_under_every_policy(policy: AccessPolicy) -> None:
    assert refusal(REMOTE, policy).code == "token_required"


@pytest.mark.parametrize("peer", [USER, REMOTE, CERTIFIED])
def test_refusal_explains_how_to_create_and_pass_a_token(peer: Peer) -> None:
    assert "forgectl tokens create" in refusal(peer).fix
    assert "FORGED_TOKEN" in refusal(peer).fix


def test_token_cannot_have_a_name_reserved_by_the_daemon() -> None:
    anyone = AccessPolicy(daemon_uid=DAEMON_UID, anonymous_loopback_role=Role.VIEWER)
    given_names = [who(ROOT).name, who(OWN_LOOPBACK).name, who(LOOPBACK, anyone).name]
    for name in given_names:
        with pytest.raises(RequestRefused):
            TokenRegistry().issue(name, Role.VIEWER, None, None, NOW, bytes(32))


@given(
    role=st.sampled_from(Role),
    jobs=st.none() | st.frozensets(st.sampled_from("abc")),
    needed=st.sampled_from(Role),
    job=st.none() | st.sampled_from("abcd"),
)
def test_authorise_refuses_exactly_the_forbidden_requests(
    role: Role, jobs: frozenset[str] | None, needed: Role, job: str | None
) -> None:
    principal = Principal("ci", role, jobs)
    if principal.may(needed, job):
        authorise(principal, needed, job)
    else:
        forbidden(principal, needed, job)


def test_refusal_names_principal_needed_role_and_fix() -> None:
    error = forbidden(Principal("ci", Role.VIEWER, frozenset({"b", "a"})), Role.WORKER, "c")
    assert error.message == "ci has role viewer for job 'a', 'b'; required is worker for job 'c'"
    assert "forgectl tokens create NAME --role worker --job c" in error.fix


def test_refusal_of_a_daemon_wide_request_says_so() -> None:
    error = forbidden(Principal("ci", Role.OPERATOR, frozenset({"a"})), Role.OPERATOR, None)
    assert error.message == "ci has role operator for job 'a'; required is operator for the whole daemon"


def test_a_refusal_counts_many_jobs_instead_of_naming_them() -> None:
    error = forbidden(Principal("ci", Role.VIEWER, frozenset("abcdefg")), Role.WORKER, "a")
    assert "for 7 jobs" in error.message


def test_job_name_is_cut_and_quoted_in_a_suggested_command() -> None:
    error = forbidden(Principal("ci", Role.VIEWER), Role.WORKER, "x; reboot" + "y" * 2**20)
    assert "--job 'x; reboot" in error.fix
    assert len(str(error)) < 1000
