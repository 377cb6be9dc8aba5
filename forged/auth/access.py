"""Who is at the other end, and whether they may.

Law: a token that is presented decides alone. When it is not accepted the caller is refused, and what the network
knows of the peer is not asked: a revoked token must never turn into something better. Without a token the strongest
evidence decides: the kernel's word on a Unix socket, a verified certificate, at last the address. Whoever cannot be
told apart from a stranger is one.
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
    # Only its shape is needed here: the module itself brings asyncio, which pure modules do without.
    from forged.net.transport.port import Peer

ROOT_UID = 0
JOBS_SHOWN_MAX = 3
WHERE_IT_GOES = "put its text into FORGED_TOKEN or the client's `token` argument"


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Which role the peers have that bring no token; None refuses them."""

    daemon_uid: int
    unix_other_role: Role | None = None
    """Users other than root and the daemon's own, whom the socket's file mode lets in."""
    certificate_roles: Mapping[str, Role] = field(default_factory=dict)
    """By the name in a client certificate that mutual TLS has verified."""
    anonymous_loopback_role: Role | None = Role.WORKER
    """Anybody on this host; None where users share the host, or a proxy on it brings in others."""


def identify(peer: Peer, token: str | None, book: TokenRegistry, policy: AccessPolicy, now: float) -> Principal:
    """Who the peer is, or `RequestRefused` with the way to become somebody."""
    if token is not None:
        return book.authenticate(token, now)
    if peer.scheme == "unix":
        return _by_uid(peer, policy)
    certified = _by_certificate(peer, policy)
    return _anonymous(peer, policy) if certified is None else certified


def authorise(principal: Principal, role_needed: Role, job: str | None) -> None:
    """Raise `RequestRefused` unless the principal may; `job` is None for what concerns the daemon as a whole."""
    if principal.may(role_needed, job):
        return
    place = "the whole daemon" if job is None else f"job {job[:JOB_CHARS_MAX]!r}"
    raise RequestRefused(
        "forbidden",
        f"{principal.name} is {principal.role} for {_scope(principal)}; this needs {role_needed} for {place}",
        f"ask an operator for a token: {_command(role_needed, job)}; {WHERE_IT_GOES}",
    )


def _by_uid(peer: Peer, policy: AccessPolicy) -> Principal:
    if peer.uid is None:
        raise _token_required("the system did not tell which user is at the other end of the socket")
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
        # Whoever shows who they are is that one, and not also a stranger who may do more.
        raise _token_required(f"the certificate {peer.certificate_name!r} has no role in certificate_roles")
    return Principal(f"certificate:{peer.certificate_name}", role)


def _anonymous(peer: Peer, policy: AccessPolicy) -> Principal:
    if peer.loopback and policy.anonymous_loopback_role is not None:
        return Principal("anonymous:loopback", policy.anonymous_loopback_role)
    raise _token_required(f"{peer.address} brings neither a token nor a certificate")


def _token_required(reason: str) -> RequestRefused:
    fix = f"on the daemon's host run {_command(Role.WORKER, None)}; {WHERE_IT_GOES}"
    return RequestRefused("token_required", reason, fix)


def _command(role: Role, job: str | None) -> str:
    # Quoted, because people paste this and the job's name came from the caller.
    bound = "" if job is None else f" --job {quote(job[:JOB_CHARS_MAX])}"
    return f"`forgectl tokens create NAME --role {role}{bound}`"


def _scope(principal: Principal) -> str:
    if principal.jobs is None:
        return "all jobs"
    if len(principal.jobs) > JOBS_SHOWN_MAX:
        return f"{len(principal.jobs)} jobs"
    return f"job {', '.join(map(repr, sorted(principal.jobs)))}"
