"""The pulse of a worker: a process that speaks for another, whatever that one does.

Law: nothing of the worker's can stop it but the worker's end. It shares no lock, no thread and no socket with it, and
knows it by descriptors that the worker handed over, which stand for that process and never for another that gets its
number. It says nothing to people, and goes: without a word when the worker wants it to or the daemon does not want to
hear of it; and when the worker has ended, or has left it the words with which it wanted to leave, after the daemon has
acknowledged that, or `REPORT_S_MAX`.

A worker that is stopped by a signal is not dead. It uses no CPU and takes no step, and that is what is told of it.

`forged.worker.process.pulse` starts it, and writes its orders to its standard input, which then stays open for as long
as the worker wants a pulse.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import msgpack

from forged.errors import ForgedError, RequestRefused
from forged.plain_client.connection import Wire
from forged.retry import REJOINING
from forged.worker.process.counters import Counters

CONTROL = 0
ANSWER_S_MAX = 3.0
"""How long the daemon may take to let us in, or to answer."""
UNHEARD_S_MAX = 2.0
"""How long what was said may go unacknowledged by the daemon's host."""
REPORT_S_MAX = 60.0
"""How long it is tried to report an end: a daemon that comes back later finds out by the worker's grace."""
OBITUARY_S_MAX = 0.05
"""How long it is waited to learn how it ended, when it is known that it does."""

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What a terminal or a supervisor sends to everybody: the worker may take its time to leave in good order."""
ENDS_IT = frozenset({"version_mismatch", "client_invalid"})
STAT_BYTES_MAX = 4096
EXITING = 0x4
"""`PF_EXITING` of the kernel."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class WatchedWorker:
    """The process of the worker: by a pidfd, by its open `/proc/PID/stat`, and by a pipe that it holds."""

    def __init__(self, pidfd: int, stat: int, control: int) -> None:
        self.over = False
        """Whether there is nothing to watch any more."""
        self.death = ""
        """How it ended; empty while it has not, as far as is known."""
        self.last_words: dict[str, Any] = {}
        """With what it has left, if it could not say so itself."""
        self._pidfd = pidfd
        self._stat = stat
        self._control = control
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)
        self._poll.register(control, select.POLLIN)

    def wait(self, seconds: float, line: Wire | None = None) -> bool:
        """Wait until something happens to the worker or on the line; tells whether it was the line."""
        if line is not None:
            self._poll.register(line, select.POLLIN)
        try:
            happened = {descriptor for descriptor, _ in self._poll.poll(max(0.0, seconds) * 1000)}
        finally:
            if line is not None:
                self._poll.unregister(line)
        if self._control in happened and (words := _words_from(self._control)):
            self.over, self.last_words = True, words
        elif self._pidfd in happened:
            self.over, self.death = True, self._obituary()
        elif self._control in happened:
            self._let_go()
        return line is not None and line.fileno() in happened

    def cpu_s(self) -> float:
        """The CPU time of all its threads so far."""
        fields = self._fields()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0

    def _let_go(self) -> None:
        """Nobody holds the pipe any more: it wants no pulse, or runs another program; unless it is just ending."""
        self.over = True
        fields = self._fields()
        if not fields or int(fields[6]) & EXITING:
            self._poll.unregister(self._control)
            self._poll.poll(OBITUARY_S_MAX * 1000)
            self.death = self._obituary()

    def _obituary(self) -> str:
        fields = self._fields()
        # The kernel tells how it ended until whoever started it has asked.
        if not fields or fields[0] != b"Z":
            return "its process has ended"
        code = os.waitstatus_to_exitcode(int(fields[49]))
        if code >= 0:
            return f"its process has ended with exit code {code}"
        known = {number.value: number.name for number in signal.Signals}
        return f"its process was killed by {known.get(-code, f'signal {-code}')}"

    def _fields(self) -> list[bytes]:
        """What `/proc/PID/stat` says from the state on; nothing of who is gone."""
        try:
            text = os.pread(self._stat, STAT_BYTES_MAX, 0)
        except ProcessLookupError:
            return []
        # The name before may be anything, with spaces and parentheses too.
        return text[text.rindex(b")") + 1 :].split()


class Pulse:
    """What is said of the worker, and to whom."""

    def __init__(
        self,
        orders: dict[str, Any],
        worker: WatchedWorker,
        counters: Counters,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._about = {name: orders[name] for name in ("job", "worker_id", "incarnation")}
        self._token = orders["token"]
        self._interval_s = orders["interval_s"]
        self._endpoints = cycle(orders["endpoints"])
        self._worker = worker
        self._counters = counters
        self._now = now
        self._sleep = sleep
        self._line: Wire | None = None
        self._pauses = REJOINING.delays(_chance)

    def speak(self) -> None:
        """Speak for the worker until it is gone, and then of its end; or until the daemon wants to hear nothing."""
        while not self._worker.over:
            try:
                self._beat(self._line or self._connect())
            except ForgedError as error:
                self._worker.wait(self._lose(error))
        if self._worker.last_words:
            self._report("LeaveJob", **self._worker.last_words)
        elif self._worker.death:
            self._report("ReportDeath", reason=self._worker.death)
        if self._line is not None:
            self._line.close()

    def _beat(self, line: Wire) -> None:
        """Say that the worker lives; and listen until it is to be said again."""
        counters = self._counters
        interval_s = counters.pulse_interval_s or self._interval_s
        again_at = self._now() + interval_s
        line.signal(
            "Pulse",
            **self._about,
            cpu_s=self._worker.cpu_s(),
            step=counters.step,
            collective_seq=counters.marks,
            interval_s=interval_s,
        )
        while not self._worker.over and (left_s := again_at - self._now()) > 0:
            if self._worker.wait(left_s, line):
                line.process_incoming()
        self._pauses = REJOINING.delays(_chance)

    def _report(self, request: str, **what: Any) -> None:
        give_up_at = self._now() + REPORT_S_MAX
        self._pauses = REJOINING.delays(_chance)
        while True:
            try:
                (self._line or self._connect()).request(request, **self._about, **what)
            except ForgedError as error:
                pause_s = self._lose(error)
            else:
                return
            if self._now() + pause_s > give_up_at:
                return
            self._sleep(pause_s)

    def _connect(self) -> Wire:
        self._line = Wire(next(self._endpoints), self._token, ANSWER_S_MAX, program="forged-pulse")
        self._line.set_user_timeout(UNHEARD_S_MAX)
        # What came together with the welcome makes nobody who waits at the socket look.
        self._line.process_incoming()
        return self._line

    def _lose(self, error: ForgedError) -> float:
        """Give up the connection; returns when to try another, or raises what no other would change."""
        if self._line is not None:
            self._line.drop()
            self._line = None
        if isinstance(error, RequestRefused) or error.code in ENDS_IT:
            raise error
        return next(self._pauses)


def _chance() -> float:
    return os.urandom(1)[0] / 256


def read_orders(control: int) -> dict[str, Any]:
    """What a worker wrote: the length, and a map. One that dies meanwhile has no pulse: `EOFError`."""
    (size,) = struct.unpack(">I", _read(control, 4))
    orders: dict[str, Any] = msgpack.unpackb(_read(control, size))
    return orders


def _words_from(control: int) -> dict[str, Any]:
    """The words with which the worker has left; none where it has just let go of the pipe."""
    try:
        return read_orders(control)
    except EOFError:
        return {}


def _read(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def main() -> None:
    """Be the pulse of the worker that started this process."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        orders = read_orders(CONTROL)
        worker = WatchedWorker(orders["pidfd"], orders["stat"], CONTROL)
        Pulse(orders, worker, Counters.attach(orders["counters"])).speak()
    except (EOFError, ForgedError):
        # Nobody is there to be told: the worker is gone, or the daemon does not want to hear of it.
        sys.exit(1)
