"""The user that owns the other end of a TCP connection within this host, as the kernel reports it.

The kernel answers by netlink (`sock_diag(7)`) for exactly one connection, at a cost that does not depend on how many
there are.

Invariants:
- A uid is returned only for an established connection whose other end is open. Once a process has closed its socket,
  the kernel reports user 0 for it, so a second answer must confirm the first.
"""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
ESTABLISHED = 1
ANSWER_BYTES_MAX = 4096
NO_COOKIE = b"\xff" * 8
ANY_STATE = 0xFFFFFFFF

HEADER = struct.Struct("=IHHII")
"""`struct nlmsghdr`: length, type, flags, sequence, port."""
REQUEST = struct.Struct("=BBBxI")
"""`struct inet_diag_req_v2` up to its socket id: family, protocol, extensions, states."""
PORTS = struct.Struct(">HH")
SOCKET_ID_BYTES = 48
ANSWER = struct.Struct(f"=BBxx{SOCKET_ID_BYTES}sIIIII")
"""`struct inet_diag_msg`: family, state, socket id, expiry, receive queue, send queue, uid, inode."""


class _Owner(NamedTuple):
    uid: int
    inode: int


def owner_uid(sock: Any) -> int | None:
    """The uid of the process at the other end of a connection within this host; None if the kernel does not say."""
    try:
        ours, theirs = sock.getsockname(), sock.getpeername()
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(0)
            owners = {_ask(netlink, theirs, ours) for _ in range(2)}
    except OSError:
        return None
    owner = owners.pop()
    return owner.uid if owner is not None and not owners else None


def _ask(netlink: socket.socket, source: tuple[Any, ...], destination: tuple[Any, ...]) -> _Owner | None:
    """The owner of the established socket with these addresses, seen from its own end."""
    (from_host, from_port), (to_host, to_port) = _plain(source), _plain(destination)
    family = socket.AF_INET if from_host.version == 4 else socket.AF_INET6
    addresses = from_host.packed.ljust(16, b"\0") + to_host.packed.ljust(16, b"\0")
    ends = PORTS.pack(from_port, to_port) + addresses
    request = REQUEST.pack(family, socket.IPPROTO_TCP, 0, ANY_STATE) + ends + struct.pack("=I", 0) + NO_COOKIE
    netlink.send(HEADER.pack(HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0) + request)
    answer = netlink.recv(ANSWER_BYTES_MAX)
    _, kind, _, _, _ = HEADER.unpack_from(answer)
    if kind != SOCK_DIAG_BY_FAMILY:
        return None
    _, state, identity, _, _, _, uid, inode = ANSWER.unpack_from(answer, HEADER.size)
    # The kernel falls back to a listening socket at the same port.
    is_it = state == ESTABLISHED and inode != 0 and identity.startswith(ends)
    return _Owner(uid, inode) if is_it else None


def _plain(address: tuple[Any, ...]) -> tuple[IPv4Address | IPv6Address, int]:
    """Host and port; a mapped IPv4 address as IPv4."""
    host = ip_address(address[0])
    return (host.ipv4_mapped or host) if isinstance(host, IPv6Address) else host, address[1]
