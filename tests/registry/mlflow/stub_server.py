"""A server that answers as it is told, in place of MLflow's."""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qsl, urlsplit

PREFIX = "/api/2.0/mlflow/"


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    fields: Mapping[str, str]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """What is sent back; `length` is announced in place of the body's own."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None


def as_json(value: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(value).encode(), status)


def not_found() -> Answer:
    return as_json({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "there is none"}, 404)


@contextmanager
def stub_server(answer: Callable[[Asked], Answer], context: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server for the block, with TLS if there is a context; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            asked = Asked(parts.path.removeprefix(PREFIX), dict(parse_qsl(parts.query)), dict(self.headers))
            said = answer(asked)
            self.send_response(said.status)
            self.send_header("Content-Length", str(len(said.body) if said.length is None else said.length))
            for name, value in said.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(said.body)

        def log_request(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        # Not through a proxy of the environment.
        with patch.dict(os.environ, {"no_proxy": "127.0.0.1"}):
            yield f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
