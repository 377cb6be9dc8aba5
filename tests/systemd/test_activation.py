from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from forged.config import Config
from forged.errors import ConfigError
from forged.net.transport.port import Address
from forged.net.transport.sockets import SystemNetwork
from forged.systemd.activation import (
    FIRST_DESCRIPTOR,
    SOCKETS_MAX,
    ActivatedNetwork,
    InheritedSocket,
    activated,
    inherited_sockets,
)
from tests.net.recording_connections import Certificates, RecordingConnections

ACTIVATE = shutil.which("systemd-socket-activate")
PID = 7

PROGRAM = """
import asyncio, json, os, sys
from forged.config import Config
from forged.net.transport.port import Address
from forged.net.transport.sockets import SystemNetwork
from forged.systemd.activation import activated, inherited_sockets

class Answer(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(json.dumps(told).encode())
        transport.close()
    def connection_lost(self, error):
        over.set()

async def main():
    global told, over
    over = asyncio.Event()
    inherited = inherited_sockets(os.environ, os.getpid())
    config, network = activated(Config(socket=sys.argv[1], listen=()), SystemNetwork(), inherited)
    wanted = [Address("unix", path=config.socket), *map(Address.parse, config.listen)]
    listeners = [await network.listen(address, Answer) for address in wanted]
    told = {
        "names": [each.name for each in inherited],
        "listeners": [str(listener.address) for listener in listeners],
        "inherited": [each.sock.get_inheritable() for each in inherited],
        "left": [name for name in os.environ if name.startswith("LISTEN_")],
    }
    await over.wait()
    for listener in listeners:
        await listener.close()

asyncio.run(main())
"""


@contextmanager
def listening(directory: Path, *kinds: str) -> Iterator[list[socket.socket]]:
    """Sockets as systemd opens them: `unix` ones in the directory, `tcp` ones at any port."""
    with ExitStack() as stack:
        sockets = []
        for index, kind in enumerate(kinds):
            if kind == "unix":
                sock = socket.socket(socket.AF_UNIX)
                sock.bind(str(directory / f"s{index}"))
            else:
                sock = socket.socket()
                sock.bind(("127.0.0.1", 0))
            sock.listen()
            sockets.append(stack.enter_context(sock))
        yield sockets


def handed(*sockets: socket.socket, name: str = "") -> list[InheritedSocket]:
    """The sockets as the process has them to which they were passed: copies."""
    return [InheritedSocket(sock.dup(), name) for sock in sockets]


def test_empty_environment_has_no_inherited_sockets() -> None:
    assert inherited_sockets({}, PID) == []


@pytest.mark.parametrize(
    "environment",
    [
        {"LISTEN_PID": "8", "LISTEN_FDS": "1"},
        {"LISTEN_FDS": "1"},
        {"LISTEN_PID": "7"},
        {"LISTEN_PID": "7", "LISTEN_FDS": "0", "LISTEN_FDNAMES": ""},
    ],
)
def test_sockets_for_another_pid_are_ignored_and_not_passed_to_children(environment: dict[str, str]) -> None:
    assert inherited_sockets(environment, PID) == []
    assert environment == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LISTEN_PID", "me"),
        ("LISTEN_FDS", "-1"),
        ("LISTEN_FDS", "3.0"),
        ("LISTEN_FDS", str(SOCKETS_MAX + 1)),
        ("LISTEN_FDS", "9" * 30),
        ("LISTEN_FDNAMES", "one:two"),
    ],
)
def test_invalid_variables_are_named(name: str, value: str) -> None:
    environment = {"LISTEN_PID": "7", "LISTEN_FDS": "1", "LISTEN_FDNAMES": ""} | {name: value}
    with pytest.raises(ConfigError, match=f"{name} must be .*, got '{value}'"):
        inherited_sockets(environment, PID)
    assert environment == {}


def run_with_descriptors(code: str, *descriptors: int) -> str:
    """Run code in a process that has these descriptors from the first inherited one on; returns what it prints."""
    count = len(descriptors)
    # Moved out of the way first, because they may overlap the places where they belong.
    shell = "".join(f"exec {40 + n}<&{fd} {fd}<&-; " for n, fd in enumerate(descriptors))
    shell += "".join(f"exec {FIRST_DESCRIPTOR + n}<&{40 + n} {40 + n}<&-; " for n in range(count))
    shell += f'export LISTEN_PID=$$ LISTEN_FDS={count}; exec "$0" -c "$1"'
    done = subprocess.run(
        ["bash", "-c", shell, sys.executable, code], pass_fds=descriptors, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REFUSED = """
import os
from forged.errors import ConfigError
from forged.systemd.activation import inherited_sockets
try:
    print([each.listener for each in inherited_sockets(os.environ, os.getpid())])
except ConfigError as error:
    print(error.code, error)
"""


def test_children_do_not_inherit_activated_sockets(tmp_path: Path) -> None:
    code = """
import os
from forged.systemd.activation import inherited_sockets
before = os.get_inheritable(3), os.get_inheritable(4)
print(before, [each.sock.get_inheritable() for each in inherited_sockets(os.environ, os.getpid())], list(os.environ))
"""
    with listening(tmp_path, "unix", "tcp") as sockets:
        told = run_with_descriptors(code, *(sock.fileno() for sock in sockets))
    assert told.startswith("(True, True) [False, False]")
    assert "LISTEN_" not in told


def test_descriptor_of_a_file_is_refused() -> None:
    reader, writer = os.pipe()
    try:
        assert "descriptor_unusable descriptor 3" in run_with_descriptors(REFUSED, reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_closed_descriptor_is_refused(tmp_path: Path) -> None:
    code = "import os\nos.environ['LISTEN_FDS'] = '3'\nos.closerange(4, 20)\n" + REFUSED
    with listening(tmp_path, "tcp") as [sock]:
        assert "descriptor_unusable descriptor 4" in run_with_descriptors(code, sock.fileno())


def test_a_socket_of_another_kind_is_refused() -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as sock:
        told = run_with_descriptors(REFUSED, sock.fileno())
    assert "descriptor_unusable" in told
    assert "AF_NETLINK" in told


def test_a_unix_socket_without_a_path_is_refused() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"\0forged-test-{os.getpid()}")
        sock.listen()
        with pytest.raises(ConfigError) as raised:
            _ = InheritedSocket(sock, "").listener
    assert raised.value.code == "socket_without_path"


def test_network_without_inherited_sockets_is_the_system_network() -> None:
    config, network = Config(), SystemNetwork()
    assert activated(config, network, []) == (config, network)


async def test_inherited_sockets_serve_connections_at_their_addresses(
    tmp_path: Path, connections: RecordingConnections
) -> None:
    with listening(tmp_path, "unix", "tcp") as sockets:
        config, network = activated(Config(socket="/other"), SystemNetwork(), handed(*sockets))
        port = sockets[1].getsockname()[1]
        assert (config.socket, config.listen) == (str(tmp_path / "s0"), (f"tcp://127.0.0.1:{port}",))
        for address in (Address("unix", path=config.socket), Address.parse(config.listen[0])):
            listener = await connections.listen(network, address)
            assert listener.address == address
            near, far = await connections.connect(network, address)
            near.open_transport.write(b"hello")
            await far.hear(b"hello")
            assert network.peer(far.open_transport).scheme == address.scheme


async def test_file_and_queue_of_an_inherited_socket_survive_the_daemon(
    tmp_path: Path, connections: RecordingConnections
) -> None:
    with listening(tmp_path, "unix") as [sock]:
        for _ in range(2):
            config, network = activated(Config(), SystemNetwork(), handed(sock))
            address = Address("unix", path=config.socket)
            await network.connect(address, connections.near)
            listener = await connections.listen(network, address)
            far = await connections.accepted.get()
            await far.made.wait()
            await listener.close()
            assert (tmp_path / "s0").is_socket()


async def test_an_inherited_socket_speaks_tls_where_the_configured_address_does(
    tmp_path: Path, connections: RecordingConnections, certificates: Certificates
) -> None:
    with listening(tmp_path, "tcp") as [sock]:
        listen = f"tls://127.0.0.1:{sock.getsockname()[1]}"
        given = SystemNetwork(tls_server=certificates.server(), tls_client=certificates.client())
        config, network = activated(replace(Config(), listen=(listen,)), given, handed(sock))
        assert config.listen == (listen,)
        await connections.listen(network, Address.parse(listen))
        _, far = await connections.connect(network, Address.parse(listen))
        assert network.peer(far.open_transport).scheme == "tls"


async def test_inherited_tls_socket_without_certificate_is_a_config_error(
    tmp_path: Path, connections: RecordingConnections
) -> None:
    with listening(tmp_path, "tcp") as [sock]:
        inherited = handed(sock, name="tls")
        config, network = activated(Config(), SystemNetwork(), inherited)
        with pytest.raises(ConfigError) as raised:
            await network.listen(Address.parse(config.listen[0]), connections.far)
        assert raised.value.code == "tls_not_configured"
        inherited[0].sock.close()


@pytest.mark.parametrize(("family", "kind"), [("inet", socket.SOCK_DGRAM), ("unix", socket.SOCK_DGRAM), ("inet", None)])
async def test_a_socket_that_does_not_listen_is_refused(
    tmp_path: Path, connections: RecordingConnections, family: str, kind: socket.SocketKind | None
) -> None:
    unix = family == "unix"
    with socket.socket(socket.AF_UNIX if unix else socket.AF_INET, kind or socket.SOCK_STREAM) as sock:
        sock.bind(str(tmp_path / "s") if unix else ("127.0.0.1", 0))
        config, network = activated(Config(), SystemNetwork(), [InheritedSocket(sock, "")])
        address = Address("unix", path=config.socket) if unix else Address.parse(config.listen[0])
        with pytest.raises(ConfigError) as raised:
            await network.listen(address, connections.far)
    assert raised.value.code == "socket_not_listening"


async def test_configured_address_without_inherited_socket_is_opened(
    tmp_path: Path, connections: RecordingConnections
) -> None:
    with listening(tmp_path, "unix") as [sock]:
        [inherited] = handed(sock)
        network = ActivatedNetwork(SystemNetwork(), [(inherited.listener.address, inherited.sock)])
        assert (await connections.listen(network, Address("tcp", host="127.0.0.1"))).address.port != 0
        inherited.sock.close()


@contextmanager
def activated_program(directory: Path, *options: str, listen: Sequence[str]) -> Iterator[None]:
    """The small program above, started by the real `systemd-socket-activate` at the first connection."""
    assert ACTIVATE is not None
    program = directory / "program.py"
    program.write_text(PROGRAM)
    flags = [flag for address in listen for flag in ("--listen", address)]
    own = [f"--setenv=PYTHONPATH={Path(__file__).parents[2]}", *options]
    command = [ACTIVATE, *flags, *own, sys.executable, str(program), str(directory / "other")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for _ in listen:
                assert "Listening on" in process.stderr.readline()
            yield
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


@pytest.mark.skipif(ACTIVATE is None, reason="systemd-socket-activate is not installed")
def test_the_real_systemd_socket_activate_passes_sockets(tmp_path: Path) -> None:
    path = tmp_path / "control"
    with activated_program(tmp_path, "--fdname=control", listen=[str(path)]), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        with client.makefile() as answer:
            told = json.loads(answer.read())
    assert told["names"] == ["control"]
    assert told["listeners"] == [f"unix://{path}"]
    assert (told["inherited"], told["left"]) == ([False], [])
