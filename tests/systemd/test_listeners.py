from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import ConfigError
from forged.net.transport.port import Address
from forged.systemd.listeners import InheritedListener, Listeners, assign_listeners

SOCKET = "/run/forged/forged.sock"
DEFAULT = ("tcp://127.0.0.1:7433",)
UNIX = InheritedListener(Address("unix", path=SOCKET))


def tcp(host: str, port: int, name: str = "") -> InheritedListener:
    return InheritedListener(Address("tcp", host=host, port=port), name)


def divided(*inherited: InheritedListener, listen: tuple[str, ...] = DEFAULT) -> tuple[str, ...]:
    return assign_listeners(inherited, SOCKET, listen, DEFAULT).listen


def test_listeners_without_inherited_sockets_are_the_configured_ones() -> None:
    assert assign_listeners([], SOCKET, DEFAULT, DEFAULT) == Listeners(SOCKET, DEFAULT, ())


def test_inherited_unix_socket_replaces_the_configured_one_at_any_path() -> None:
    other = InheritedListener(Address("unix", path="/elsewhere"), "control")
    assert assign_listeners([other], SOCKET, DEFAULT, DEFAULT) == Listeners("/elsewhere", DEFAULT, (other.address,))


def test_default_address_is_not_opened_besides_an_inherited_tcp_socket() -> None:
    assert divided(tcp("0.0.0.0", 9000), UNIX) == ("tcp://0.0.0.0:9000",)
    assert divided(UNIX) == DEFAULT


def test_configured_address_is_opened_besides_an_inherited_tcp_socket() -> None:
    assert divided(tcp("10.0.0.1", 9000), listen=("tcp://10.0.0.1:1", "tls://10.0.0.1:2")) == (
        "tcp://10.0.0.1:9000",
        "tcp://10.0.0.1:1",
        "tls://10.0.0.1:2",
    )


@pytest.mark.parametrize(
    ("configured", "host", "served"),
    [
        ("tcp://10.0.0.1:7433", "10.0.0.1", "tcp://10.0.0.1:7433"),
        ("tls://10.0.0.1:7433", "10.0.0.1", "tls://10.0.0.1:7433"),
        ("tls://[0:0::1]:7433", "::1", "tls://[::1]:7433"),
        ("tcp://localhost:7433", "127.0.0.1", "tcp://127.0.0.1:7433"),
        ("tcp://LOCALHOST:7433", "::1", "tcp://[::1]:7433"),
        ("tls://0.0.0.0:7433", "::", "tls://[::]:7433"),
        ("tls://10.0.0.1:7433", "::ffff:10.0.0.1", "tls://[::ffff:10.0.0.1]:7433"),
    ],
)
def test_inherited_socket_replaces_the_same_address_and_keeps_its_scheme(
    configured: str, host: str, served: str
) -> None:
    # The other name of the descriptor does not count where the address is configured.
    for name in ("", "tls"):
        assert divided(tcp(host, 7433, name), listen=(configured,)) == (served,)


def test_ipv4_and_ipv6_sockets_replace_localhost() -> None:
    both = (tcp("127.0.0.1", 7433), tcp("::1", 7433))
    assert divided(*both, listen=("tls://localhost:7433",)) == ("tls://127.0.0.1:7433", "tls://[::1]:7433")


@pytest.mark.parametrize("configured", ["tcp://10.0.0.1:7434", "tcp://10.0.0.2:7433", "tcp://10.0.0.1:0"])
def test_other_configured_addresses_are_opened(configured: str) -> None:
    assert divided(tcp("10.0.0.1", 7433), listen=(configured,)) == ("tcp://10.0.0.1:7433", configured)


def test_unconfigured_socket_is_tls_if_its_descriptor_name_is_tls() -> None:
    sockets = (tcp("10.0.0.1", 1, "tls"), tcp("10.0.0.1", 2, "workers"), tcp("10.0.0.1", 3))
    assert divided(*sockets, listen=()) == ("tls://10.0.0.1:1", "tcp://10.0.0.1:2", "tcp://10.0.0.1:3")


def test_two_inherited_unix_sockets_are_refused() -> None:
    other = InheritedListener(Address("unix", path="/elsewhere"))
    with pytest.raises(ConfigError, match=r"/run/forged/forged\.sock, /elsewhere") as raised:
        assign_listeners([UNIX, other], SOCKET, DEFAULT, DEFAULT)
    assert raised.value.code == "sockets_too_many"


hosts = st.sampled_from(["127.0.0.1", "::1", "0.0.0.0", "::", "10.0.0.1"])
ports = st.integers(1, 4)
texts = st.builds(
    lambda scheme, host, port: str(Address(scheme, host=host, port=port)),
    st.sampled_from(["tcp", "tls"]),
    st.one_of(hosts, st.just("localhost")),
    ports,
)


@given(st.lists(st.builds(tcp, hosts, ports, st.sampled_from(["", "tls"])), max_size=4), st.lists(texts, max_size=4))
def test_every_inherited_socket_is_served_at_one_address(inherited: list[InheritedListener], listen: list[str]) -> None:
    listeners = assign_listeners(inherited, SOCKET, listen, DEFAULT)
    found = [Address.parse(text) for text in listeners.listen]
    assert found[: len(inherited)] == list(listeners.inherited)
    assert [(listener.host, listener.port) for listener in listeners.inherited] == [
        (listener.address.host, listener.address.port) for listener in inherited
    ]
    assert set(listeners.listen[len(inherited) :]) <= set(listen)


def place(listener: InheritedListener) -> tuple[str, int]:
    """Where only one socket can be."""
    return listener.address.host.replace("0.0.0.0", "::"), listener.address.port


sockets_apart = st.lists(st.builds(tcp, hosts, ports, st.sampled_from(["", "tls"])), max_size=4, unique_by=place)


@given(sockets_apart, st.lists(texts, max_size=4))
def test_assigning_listeners_twice_changes_nothing(inherited: list[InheritedListener], listen: list[str]) -> None:
    listeners = assign_listeners(inherited, SOCKET, listen, DEFAULT)
    assert assign_listeners(inherited, listeners.socket, listeners.listen, DEFAULT) == listeners
