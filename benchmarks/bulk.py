"""Bulk bytes from one process to another over loopback TCP, against bare blocking sockets.

The reference is what one would write in ten lines: `sendfile` into `recv_into` and `write`, or `sendall` into
`recv_into`; over TLS the same with blocking `ssl` sockets. Files and memory are touched before the clock starts, on
both sides and for both subjects, because the first touch would drown everything else.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import ssl
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import trustme

from benchmarks.harness import Figure, interleaved, main
from forged.net.bulk import movers
from forged.net.transport import tls

GIB = 1 << 30
SIZE_BYTES, ROUNDS = 2 * GIB, 7
QUICK_SIZE_BYTES, QUICK_ROUNDS = GIB // 16, 1
FILL = os.urandom(1 << 20) * 8
REFERENCE_BUFFER_BYTES = 1 << 20
PLAIN_AIM = 0.9
SHARED_MEMORY = Path("/dev/shm")
UNIT = "GiB/s"

Mover = Callable[[socket.socket], None]


class Encryption(NamedTuple):
    """The contexts of both ends."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@dataclass(frozen=True)
class Ends(ABC):
    """What the bytes come from and go to, and both ways to move them."""

    size: int

    @abstractmethod
    def touch(self) -> None:
        """Called in the receiving process before the clock starts."""

    @abstractmethod
    def send(self, sock: socket.socket) -> None: ...

    @abstractmethod
    def receive(self, sock: socket.socket) -> None: ...

    @abstractmethod
    def send_bare(self, sock: socket.socket) -> None: ...

    @abstractmethod
    def receive_bare(self, sock: socket.socket) -> None: ...


@dataclass(frozen=True)
class Files(Ends):
    """From one file to another."""

    source: int
    destination: int

    def touch(self) -> None:
        """The page cache belongs to no process."""

    def send(self, sock: socket.socket) -> None:
        movers.send_file(sock, self.source, 0, self.size)

    def receive(self, sock: socket.socket) -> None:
        movers.receive_into_file(sock, self.destination, 0, self.size)

    def send_bare(self, sock: socket.socket) -> None:
        if isinstance(sock, ssl.SSLSocket):
            self._send_read(sock)
            return
        sent = 0
        while sent < self.size:
            sent += os.sendfile(sock.fileno(), self.source, sent, self.size - sent)

    def receive_bare(self, sock: socket.socket) -> None:
        buffer = memoryview(bytearray(REFERENCE_BUFFER_BYTES))
        os.lseek(self.destination, 0, os.SEEK_SET)
        received = 0
        while received < self.size:
            size = sock.recv_into(buffer)
            os.write(self.destination, buffer[:size])
            received += size

    def _send_read(self, sock: socket.socket) -> None:
        buffer = memoryview(bytearray(REFERENCE_BUFFER_BYTES))
        os.lseek(self.source, 0, os.SEEK_SET)
        while size := os.readv(self.source, [buffer]):
            sock.sendall(buffer[:size])


@dataclass(frozen=True)
class Memory(Ends):
    """From memory to memory."""

    source: memoryview
    destination: memoryview

    def touch(self) -> None:
        self.destination[:: mmap.PAGESIZE].tobytes()

    def send(self, sock: socket.socket) -> None:
        movers.send_buffer(sock, self.source)

    def receive(self, sock: socket.socket) -> None:
        movers.receive_into_buffer(sock, self.destination)

    def send_bare(self, sock: socket.socket) -> None:
        sock.sendall(self.source)

    def receive_bare(self, sock: socket.socket) -> None:
        received = 0
        while received < self.size:
            received += sock.recv_into(self.destination[received:])


@contextmanager
def files(size: int, directory: Path) -> Iterator[Files]:
    """Two written files without names."""
    with tempfile.TemporaryFile(dir=directory) as source, tempfile.TemporaryFile(dir=directory) as destination:
        for file in (source, destination):
            for offset in range(0, size, len(FILL)):
                os.pwrite(file.fileno(), FILL[: size - offset], offset)
            os.fsync(file.fileno())
        yield Files(size, source.fileno(), destination.fileno())


@contextmanager
def memory(size: int) -> Iterator[Memory]:
    """Two written buffers, shared, so that the receiving process has these pages and no copies of them."""
    source, destination = memoryview(mmap.mmap(-1, size)), memoryview(mmap.mmap(-1, size))
    for view in (source, destination):
        for offset in range(0, size, len(FILL)):
            view[offset : offset + len(FILL)] = FILL[: size - offset]
    yield Memory(size, source, destination)


def rate(ends: Ends, sender: Mover, receiver: Mover, encryption: Encryption | None) -> float:
    """GiB/s from before the first byte is sent until the receiver says that it has the last."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = (listener, ends, receiver, encryption)
        process = multiprocessing.get_context("fork").Process(target=_receive, args=arguments)
        process.start()
        with socket.create_connection(listener.getsockname()) as plain:
            sock = encryption.client.wrap_socket(plain, server_hostname="localhost") if encryption else plain
            with sock:
                sock.recv(1)
                start = time.monotonic()
                sender(sock)
                sock.recv(1)
                elapsed_s = time.monotonic() - start
        process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"the receiver ended with {process.exitcode}")
    return ends.size / GIB / elapsed_s


def _receive(listener: socket.socket, ends: Ends, receiver: Mover, encryption: Encryption | None) -> None:
    ends.touch()
    plain, _ = listener.accept()
    sock = encryption.server.wrap_socket(plain, server_side=True) if encryption else plain
    with sock:
        sock.sendall(b"r")
        receiver(sock)
        sock.sendall(b"d")


def compare(name: str, ends: Ends, rounds: int, encryption: Encryption | None = None) -> Figure:
    """Ours and the bare sockets in turn."""
    medians = interleaved(
        rounds,
        {
            "ours": lambda: rate(ends, ends.send, ends.receive, encryption),
            "reference": lambda: rate(ends, ends.send_bare, ends.receive_bare, encryption),
        },
    )
    aim = None if encryption else PLAIN_AIM
    return Figure(name, UNIT, medians["ours"], medians["reference"], aim)


def make_encryption(directory: Path) -> Encryption:
    """An authority made for the occasion, and its certificate for this machine."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    identity = authority.issue_cert("localhost")
    identity.private_key_and_cert_chain_pem.write_to_path(directory / "server.pem")
    server = tls.server_context(directory / "server.pem", directory / "server.pem")
    return Encryption(server, tls.client_context(directory / "ca.pem"))


def measure(quick: bool) -> list[Figure]:
    """All rows; TLS stands apart and has no aim, because its cost is the cipher's."""
    size, rounds = (QUICK_SIZE_BYTES, QUICK_ROUNDS) if quick else (SIZE_BYTES, ROUNDS)
    figures = []
    with ExitStack() as stack:
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        encryption = make_encryption(disk)
        with files(size, SHARED_MEMORY) as ends:
            figures.append(compare("file to file, /dev/shm", ends, rounds))
            figures.append(compare("file to file, /dev/shm, TLS", ends, rounds, encryption))
        with files(size, disk) as ends:
            figures.append(compare("file to file, disk", ends, rounds))
        with memory(size) as buffers:
            figures.append(compare("buffer to buffer", buffers, rounds))
            figures.append(compare("buffer to buffer, TLS", buffers, rounds, encryption))
    return figures


if __name__ == "__main__":
    main("bulk", measure)
