"""Where a worker's host is found by others.

Law: it is named as the daemon's host would reach it; who speaks to the daemon on this host alone is found here.
"""

from __future__ import annotations

import socket

from forged.net.transport.port import Address

LOOPBACK = "127.0.0.1"


def own_host(endpoint: str | None) -> str:
    """The address of this host that somebody at the daemon's would use."""
    address = Address.parse(endpoint) if endpoint else Address("unix", path="")
    if address.scheme == "unix":
        return LOOPBACK
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the system only says which of its addresses it would use.
            probe.connect((address.host, address.port))
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
