"""A fake daemon that records the pulses of workers, and worker processes to be killed."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forged.net.protocol.messages import Failure, ReplyOut, RequestMessage, SignalMessage
from tests.client.fake_daemon import FakeConnection, FakeDaemon
from tests.client.threaded_daemon import EventLoopThread

INTERVAL_S = 0.02
PATIENCE_S = 60.0
WORKER_S_MAX = 300
INCARNATION = b"incarnation of 1"


class RecordedMessage(NamedTuple):
    at: float
    name: str
    body: dict[str, Any]


class RecordingDaemon:
    """A fake daemon that records its messages. `refusals` are its answers, by request name and for `Hello`."""

    def __init__(self, path: Path) -> None:
        self.endpoint = f"unix://{path}"
        self.messages: queue.Queue[RecordedMessage] = queue.Queue()
        self.refusals: dict[str, Failure] = {}
        self._path = path
        self._loop = EventLoopThread()
        self.open()

    def open(self) -> None:
        """Listen (again)."""
        self._fake = FakeDaemon(self._path, self._serve)
        self._loop.call(self._fake.__aenter__)

    def close(self) -> None:
        """Close the listener and all connections."""
        self._loop.call(self._fake.__aexit__)
        self._path.unlink()

    def end(self) -> None:
        if self._path.exists():
            self.close()
        self._loop.end()

    def next(self, name: str) -> RecordedMessage:
        """The next message of this name; messages before it are skipped."""
        while (message := self.messages.get(timeout=PATIENCE_S)).name != name:
            pass
        return message

    def forget(self) -> None:
        """Drop the messages so far."""
        while not self.messages.empty():
            self.messages.get_nowait()

    async def _serve(self, connection: FakeConnection) -> None:
        if "Hello" in self.refusals:
            await connection.receive()
            connection.send(self.refusals["Hello"])
            await connection.wait_closed()
            return
        hello = await connection.accept_hello()
        self._hear("Hello", {"agent": hello.agent, "token": hello.token})
        while True:
            message = await connection.receive()
            if isinstance(message, SignalMessage):
                self._hear(message.name, msgspec.msgpack.decode(message.body))
            elif isinstance(message, RequestMessage):
                self._hear(message.method, msgspec.msgpack.decode(message.body))
                connection.send(self.refusals.get(message.method) or ReplyOut(message.number, {}))
            else:
                self._hear(type(message).__name__, {})

    def _hear(self, name: str, body: dict[str, Any]) -> None:
        self.messages.put(RecordedMessage(time.perf_counter(), name, body))


class PulseWorker:
    """A worker's process with a pulse; it runs `way`, a line of Python."""

    def __init__(self, endpoint: str, way: str, interval_s: float = INTERVAL_S) -> None:
        command = [sys.executable, "-m", __name__, endpoint, f"{interval_s}", way]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        self.pulse: int = json.loads(self.stdout.readline())["pulse"]
        self.pulse_end = os.pidfd_open(self.pulse)
        # It runs its line once the pulse is known, which the line may end at once.
        with self.process.stdin as go:
            go.write("go\n")

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> float:
        """Kill it with -9; returns when."""
        at = time.perf_counter()
        self.process.kill()
        return at

    def pulse_is_gone(self, within_s: float = PATIENCE_S) -> bool:
        """Whether its pulse ends in time."""
        return is_over(self.pulse_end, within_s)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if not self.pulse_is_gone(0.0):
            os.kill(self.pulse, signal.SIGKILL)
        os.close(self.pulse_end)
        self.stdout.close()


@contextmanager
def pulse_worker(endpoint: str, way: str = "signal.pause()", interval_s: float = INTERVAL_S) -> Iterator[PulseWorker]:
    """A worker that is killed at the end of the block."""
    one = PulseWorker(endpoint, way, interval_s)
    try:
        yield one
    finally:
        one.end()


def is_over(pidfd: int, within_s: float) -> bool:
    """Whether a process ends in time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def state(pid: int) -> str:
    """The kernel's letter for what a process does."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def main(endpoint: str, interval: str, way: str) -> None:
    """Run as a worker."""
    from forged.worker.process.counters import Counters
    from forged.worker.process.pulse import PulseProcess

    # Ends the worker if the tests were killed.
    signal.alarm(WORKER_S_MAX)
    counters = Counters.create()
    counters.step, counters.marks = 3, 7
    pulse = PulseProcess.start(
        [endpoint], "run", "w1", INCARNATION, os.environ.get("FORGED_TOKEN"), counters, interval_s=float(interval)
    )
    print(json.dumps({"pulse": pulse.pid}), flush=True)
    sys.stdin.readline()
    exec(way, {"os": os, "signal": signal, "threading": threading, "counters": counters, "pulse": pulse})


if __name__ == "__main__":
    main(*sys.argv[1:])
