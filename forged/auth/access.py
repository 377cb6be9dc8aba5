"""Identify the principal of a peer, and check whether it may execute a request.

Invariants:
- If a token is presented, it alone decides. An invalid token is refused, without fallback to the peer's address.
- Without a token the strongest evidence decides: the uid of a Unix socket's peer, a verified certificate, the uid of a
  peer on the loopback interface, the address.
- A peer that matches no rule has no principal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING

from forged.auth.model import Principal, Role
from forged.auth.tokens import JOB_CHARS_MAX, TokenRegistry
from forged.errors import RequestRefused

if TYPE_CHECKING:
    # For type checking only: the module imports asyncio, which pure modules must not import.
    from forged.net.transport.port import Peer

ROOT_UID = 0
JOBS_SHOWN_MAX = 3
CLIENT_SETTING = "pass it in FORGED_TOKEN or as the client's `token` argument"


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The roles of peers without a token; None refuses them."""

    daemon_uid: int
    unix_other_role: Role | None = None
    """The role of users other than root and the daemon's user, if the socket's file mode admits them."""
    certificate_roles: Mapping[str, Role] = field(default_factory=dict)
    """Roles by the name in the verified client certificate."""
    own_user_loopback_role: Role | None = Role.WORKER
    """The role of the daemon's own user over TCP from this host; None if its processes forward remote clients."""
    anonymous_loopback_role: Role | None = None
    """The role of every user and program over TCP from this host."""


def identify(peer: Peer, token: str | None, tokens: TokenRegistry, policy: AccessPolicy, now: float) -> Principal:
    """The peer's principal; raises `RequestRefused` if it has none."""
    if token is not None:
        return tokens.authenticate(token, now)
    if peer.scheme == "unix":
        return _by_uid(peer, policy)
    certified = _by_certificate(peer, policy)
    return _anonymous(peer, policy) if certified is None else certified


def authorise(principal: Principal, role_needed: Role, job: str | None) -> None:
    """Raise `RequestRefused` unless the principal has the role for the job; None means the whole daemon."""
    if principal.may(role_needed, job):
        return
    scope = "the whole daemon" if job is None else f"job {job[:JOB_CHARS_MAX]!r}"
    raise RequestRefused(
        "forbidden",
        f"{principal.name} has role {principal.role} for {_scope(principal)}; required is {role_needed} for {scope}",
        f"ask an operator for a token: {_command(role_needed, job)}; {CLIENT_SETTING}",
    )


def _by_uid(peer: Peer, policy: AccessPolicy) -> Principal:
    if peer.uid is None:
        raise _token_required("the peer's uid is unknown")
    name = f"unix:{peer.uid}"
    if peer.uid in (ROOT_UID, policy.daemon_uid):
        return Principal(name, Role.OPERATOR)
    if policy.unix_other_role is None:
        raise _token_required(f"user {peer.uid} has no role on this socket")
    return Principal(name, policy.unix_other_role)


def _by_certificate(peer: Peer, policy: AccessPolicy) -> Principal | None:
    if peer.scheme != "tls" or peer.certificate_name is None:
        return None
    role = policy.certificate_roles.get(peer.certificate_name)
    if role is None:
        # A peer with a certificate is not treated as anonymous, which might have more rights.
        raise _token_required(f"the certificate {peer.certificate_name!r} has no role in certificate_roles")
    return Principal(f"certificate:{peer.certificate_name}", role)


def _anonymous(peer: Peer, policy: AccessPolicy) -> Principal:
    anonymous, own = policy.anonymous_loopback_role, policy.own_user_loopback_role
    if (
        peer.loopback
        and peer.uid == policy.daemon_uid
        and own is not None
        and not (anonymous and anonymous.covers(own))
    ):
        return Principal(f"loopback:{peer.uid}", own)
    if peer.loopback and anonymous is not None:
        return Principal("anonymous:loopback", anonymous)
    raise _token_required(f"{peer.address}{_user(peer)} presented neither a token nor a certificate")


def _user(peer: Peer) -> str:
    return f" (user {'unknown' if peer.uid is None else peer.uid})" if peer.loopback else ""


def _token_required(reason: str) -> RequestRefused:
    fix = f"on the daemon's host run {_command(Role.WORKER, None)}; {CLIENT_SETTING}"
    return RequestRefused("token_required", reason, fix)


def _command(role: Role, job: str | None) -> str:
    # Quoted: operators paste the command, and the job name came from the caller.
    bound = "" if job is None else f" --job {quote(job[:JOB_CHARS_MAX])}"
    return f"`forgectl tokens create NAME --role {role}{bound}`"


def _scope(principal: Principal) -> str:
    if principal.jobs is None:
        return "all jobs"
    if len(principal.jobs) > JOBS_SHOWN_MAX:
        return f"{len(principal.jobs)} jobs"
    return f"job {', '.join(map(repr, sorted(principal.jobs)))}"
