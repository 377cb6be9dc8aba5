"""Which doors were opened for the daemon, and which it opens itself.

Law: nothing that was handed over is left unused, and no address is opened twice. An inherited socket takes the place of
the configured address that is the same, and is TLS where that is; an inherited Unix socket takes the place of the
configured one wherever it is, because there is one control socket; any other is served in addition.
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
    """Where an inherited socket listens, `unix` or `tcp`, and what its unit calls it."""

    address: Address
    name: str = ""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Where the daemon serves; `inherited` says as which of these addresses each inherited socket does, in order."""

    socket: str
    listen: tuple[str, ...]
    inherited: tuple[Address, ...]


def divide(
    inherited: Sequence[InheritedListener], socket: str, listen: Sequence[str], default: Sequence[str]
) -> Listeners:
    """Give each inherited socket its place; `default` is what `listen` is when nobody has set it."""
    configured = {address: Address.parse(address) for address in listen}
    served = tuple(_as_served(door, configured.values()) for door in inherited)
    ports = [address for address in served if address.scheme != "unix"]
    unset = bool(ports) and tuple(listen) == tuple(default)
    opened = [] if unset else [text for text, address in configured.items() if not _taken(address, ports)]
    paths = [address.path for address in served if address.scheme == "unix"]
    if len(paths) > 1:
        raise ConfigError(
            "sockets_too_many",
            f"there is one control socket, and {len(paths)} Unix sockets were passed: {', '.join(paths)}",
            "leave one ListenStream= with a path in the socket unit",
        )
    return Listeners(paths[0] if paths else socket, (*map(str, ports), *opened), served)


def _as_served(door: InheritedListener, configured: Iterable[Address]) -> Address:
    address = door.address
    if address.scheme == "unix":
        return address
    schemes = [each.scheme for each in configured if _same(each, address)]
    scheme = schemes[0] if schemes else "tls" if door.name == TLS_NAME else "tcp"
    return Address(scheme, host=address.host, port=address.port)


def _taken(configured: Address, ports: Iterable[Address]) -> bool:
    return any(_same(configured, port) for port in ports)


def _same(one: Address, other: Address) -> bool:
    return one.port == other.port and not _meanings(one.host).isdisjoint(_meanings(other.host))


def _meanings(host: str) -> frozenset[str]:
    """What a host stands for: two that share a meaning cannot both be listened at with the same port."""
    if host.lower() == "localhost":
        return frozenset({"127.0.0.1", "::1"})
    try:
        number = ip_address(host)
    except ValueError:
        return frozenset({host.lower()})
    if isinstance(number, IPv6Address):
        number = number.ipv4_mapped or number
    # Listening at all IPv6 addresses, as systemd does for a bare port, takes the IPv4 ones too.
    return frozenset({"any" if number.is_unspecified else str(number)})
