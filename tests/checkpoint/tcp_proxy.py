"""A TCP proxy that can hold back or drop what passes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

RECEIVED_BYTES_MAX = 1 << 18
METHODS = (b"DELETE ", b"GET ", b"HEAD ", b"POST ", b"PUT ")


class TcpProxy:
    """Forwards connections to a port of this host."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._keeps_all = False
        self._swallowed = b""
        self._delayed = b""
        self._released = threading.Event()
        self.requests: list[bytes] = []
        """The first lines of the requests that went through, or were begun."""
        self.connections = 0
        self.held_back = threading.Event()
        """Set when bytes were held back."""
        self.hung_up = threading.Event()
        """Set when a client has then closed its connection."""

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._released.set()
        with self._lock:
            for one in self._sockets:
                _shut(one)
        for thread in self._threads:
            thread.join()
        for one in [self._listener, *self._sockets]:
            one.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def stall(self) -> None:
        """Receive everything and forward nothing from now on."""
        self._keeps_all = True

    def swallow(self, start: bytes) -> None:
        """Forward the next request that begins with these bytes, and close the connection instead of answering."""
        self._swallowed = start

    def delay_end(self, text: bytes) -> None:
        """Hold back the last byte of the next request with this text in its first line, until `release`."""
        self._delayed = text

    def release(self) -> None:
        """Let the request that was delayed reach its server, also when its client has gone."""
        self._released.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            with self._lock:
                self.connections += 1
                self._sockets += [client, server]
            muted = threading.Event()
            self._start(partial(self._ask, client, server, muted))
            self._start(partial(self._answer, server, client, muted))

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _ask(self, client: socket.socket, server: socket.socket, muted: threading.Event) -> None:
        while data := _received(client):
            if data.startswith(METHODS):
                self.requests.append(data.partition(b"\r\n")[0])
            if self._delayed and self._delayed in data.partition(b"\r\n")[0]:
                self._delayed = b""
                data = self._kept_back(data, client, server)
            if self._swallowed and data.startswith(self._swallowed):
                self._swallowed = b""
                muted.set()
            self._pass(data, server)
        if self._keeps_all:
            self.hung_up.set()
        _shut(server)

    def _kept_back(self, data: bytes, client: socket.socket, server: socket.socket) -> bytes:
        """Relay a request but for its last byte, which is returned when it may go on."""
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        missing = int(lengths[0].partition(b":")[2]) - len(body)
        while missing and (more := _received(client)):
            self._pass(data, server)
            data, missing = more, missing - len(more)
        self._pass(data[:-1], server)
        self.held_back.set()
        self._released.wait()
        return data[-1:]

    def _answer(self, server: socket.socket, client: socket.socket, muted: threading.Event) -> None:
        while (data := _received(server)) and not muted.is_set():
            self._pass(data, client)
        _shut(client)

    def _pass(self, data: bytes, to: socket.socket) -> None:
        if self._keeps_all:
            self.held_back.set()
            return
        try:
            to.sendall(data)
        except OSError:
            _shut(to)


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(RECEIVED_BYTES_MAX)
    except OSError:
        return b""


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
