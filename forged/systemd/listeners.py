"""Combines inherited sockets with the configured addresses.

Invariants:
- Every inherited socket is served, and no address is opened twice.
- An inherited TCP socket replaces the configured address that is equal to it, and uses TLS if that does; any other is
  served in addition. An inherited Unix socket always replaces the configured control socket, because there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from forged.errors import ConfigError
from forged.net.transport.port import Address

TLS_NAME = "tls"
"""The `FileDescriptorName=` of sockets that speak TLS, where no configured address says so."""


@dataclass(frozen=True, slots=True)
class InheritedListener:
    """The address of an inherited socket, `unix` or `tcp`, and its `FileDescriptorName=`."""

    address: Address
    name: str = ""


@dataclass(frozen=True, slots=True)
class Listeners:
    """The addresses that the daemon serves; `inherited` has the address of each inherited socket, in order."""

    socket: str
    listen: tuple[str, ...]
    inherited: tuple[Address, ...]


def assign_listeners(
    inherited: Sequence[InheritedListener], socket: str, listen: Sequence[str], default: Sequence[str]
) -> Listeners:
    """Assign each inherited socket to an address; `default` is the default of the `listen` setting."""
    configured = {address: Address.parse(address) for address in listen}
    served = tuple(_served_address(listener, configured.values()) for listener in inherited)
    ports = [address for address in served if address.scheme != "unix"]
    unset = bool(ports) and tuple(listen) == tuple(default)
    opened = [] if unset else [text for text, address in configured.items() if not _is_inherited(address, ports)]
    paths = [address.path for address in served if address.scheme == "unix"]
    if len(paths) > 1:
        raise ConfigError(
            "sockets_too_many",
            f"there is one control socket, and {len(paths)} Unix sockets were passed: {', '.join(paths)}",
            "leave one ListenStream= with a path in the socket unit",
        )
    return Listeners(paths[0] if paths else socket, (*map(str, ports), *opened), served)


def _served_address(listener: InheritedListener, configured: Iterable[Address]) -> Address:
    address = listener.address
    if address.scheme == "unix":
        return address
    schemes = [each.scheme for each in configured if _same(each, address)]
    scheme = schemes[0] if schemes else "tls" if listener.name == TLS_NAME else "tcp"
    return Address(scheme, host=address.host, port=address.port)


def _is_inherited(configured: Address, ports: Iterable[Address]) -> bool:
    return any(_same(configured, port) for port in ports)


def _same(one: Address, other: Address) -> bool:
    return one.port == other.port and not _equivalent_hosts(one.host).isdisjoint(_equivalent_hosts(other.host))


def _equivalent_hosts(host: str) -> frozenset[str]:
    """The addresses that a host stands for; two hosts that share one cannot be bound to the same port."""
    if host.lower() == "localhost":
        return frozenset({"127.0.0.1", "::1"})
    try:
        number = ip_address(host)
    except ValueError:
        return frozenset({host.lower()})
    if isinstance(number, IPv6Address):
        number = number.ipv4_mapped or number
    # Listening on all IPv6 addresses, as systemd does for a bare port, includes all IPv4 addresses.
    return frozenset({"any" if number.is_unspecified else str(number)})
