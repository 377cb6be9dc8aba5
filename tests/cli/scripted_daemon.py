"""A daemon of any version that answers requests with replies written by the test."""

from __future__ import annotations

import asyncio
import shlex
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from json import loads
from pathlib import Path
from typing import Any

import msgpack
import pytest

from forged.cli.forgectl import main
from tests.client.fake_daemon import FakeConnection, FakeDaemon
from tests.client.threaded_daemon import EventLoopThread

HELLO, WELCOME, REQUEST, REPLY, FAILURE, SUBSCRIBE, FACTS = 0, 1, 2, 3, 4, 6, 7
SAME = "forged/0.1.0"


class Refusal:
    """A refusal."""

    def __init__(self, kind: str, code: str, text: str = "no", fix: str = "") -> None:
        self.said = [kind, code, text, fix]


UNKNOWN = Refusal("refused", "request_unknown", "unknown request", "compare versions")


class ScriptedDaemon:
    """The replies, and the received requests."""

    def __init__(
        self, path: Path, answers: Mapping[str, Any], agent: str, facts: list[Any], welcome: list[Any] | None
    ) -> None:
        self.path = path
        self.requests: list[tuple[str, Any]] = []
        self._answers = answers
        self._facts = facts
        latest = len(facts)
        self._welcome = welcome or [WELCOME, 1, agent, "unix:0", "operator", "a history", latest, 1, 4 << 20, 1024, 0]

    async def treat(self, connection: FakeConnection) -> None:
        while True:
            length = int.from_bytes(await connection.reader.readexactly(4), "big")
            message = msgpack.unpackb(await connection.reader.readexactly(length))
            if message[0] == HELLO:
                self._say(connection, self._welcome)
            elif message[0] == REQUEST:
                self._say(connection, self._answer(*message[1:5]))
            elif message[0] == SUBSCRIBE:
                self._say(connection, [FACTS, 1, len(self._facts), self._facts])

    def run(self, line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
        """Run `forgectl` on it; returns exit code, output and errors."""
        code = main.main(["--socket", str(self.path), *shlex.split(line)])
        said = capsys.readouterr()
        return code, said.out, said.err

    def json(self, line: str, capsys: pytest.CaptureFixture[str]) -> Any:
        """The JSON output of a command."""
        code, out, err = self.run(f"{line} --json", capsys)
        assert (code, err) == (0, "")
        return loads(out)

    def command(self, line: str) -> list[str]:
        """The command line of a `forgectl` process that uses it."""
        return [sys.executable, "-m", "forged.cli.forgectl.main", "--socket", str(self.path), *shlex.split(line)]

    def _answer(self, number: int, acknowledged: int, method: str, fields: Any) -> list[Any]:
        self.requests.append((method, fields))
        answer = self._answers.get(method, UNKNOWN)
        if callable(answer):
            answer = answer(fields)
        if isinstance(answer, Refusal):
            return [FAILURE, number, *answer.said]
        return [REPLY, number, answer]

    def _say(self, connection: FakeConnection, message: list[Any]) -> None:
        payload = msgpack.packb(message)
        connection.writer.write(struct.pack(">I", len(payload)) + payload)


@contextmanager
def scripted_daemon(
    directory: Path,
    answers: Mapping[str, Any] | None = None,
    *,
    agent: str = SAME,
    facts: list[Any] | None = None,
    welcome: list[Any] | None = None,
) -> Iterator[ScriptedDaemon]:
    """A scripted daemon on a socket in a directory."""
    pretender = ScriptedDaemon(directory / "daemon", answers or {}, agent, facts or [], welcome)
    loop = EventLoopThread()
    fake = FakeDaemon(pretender.path, pretender.treat)
    loop.call(fake.__aenter__)
    try:
        yield pretender
    finally:
        loop.call(fake.__aexit__)
        pretender.path.unlink()
        loop.end()


async def say_nothing(connection: FakeConnection) -> None:
    """Receive, and never reply."""
    await connection.wait_closed()


async def trickle(connection: FakeConnection) -> None:
    """Send an incomplete message byte by byte, without end."""
    connection.writer.write(b"\0\0\xff\xff")
    while True:
        connection.writer.write(b"\x90")
        await connection.writer.drain()
        await asyncio.sleep(0.01)
