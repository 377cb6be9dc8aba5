"""The pulse of a worker: a process that reports the worker's liveness, whatever the worker does.

Invariants:
- Only the worker's end stops the pulse. It shares no lock, thread or socket with the worker, and identifies the worker
  by descriptors that stay valid when the pid is reused.
- The pulse has no output. It ends silently when the worker closes its pipe or the daemon refuses the worker. When the
  worker has died, or has handed its leave to the pulse, the pulse ends after the daemon has acknowledged the report, or
  after `REPORT_S_MAX`.
- A worker that a signal has stopped is not dead: the pulse reports that it uses no CPU and takes no step.

`forged.worker.process.pulse` starts it and writes its orders to its standard input, which stays open for as long as the
worker wants a pulse.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

import msgpack

from forged.errors import ForgedError, RequestRefused
from forged.plain_client.connection import PlainConnection
from forged.retry import REJOINING
from forged.worker.process.counters import Counters
from forged.worker.process.stack_dump import STACKS_BYTES_MAX, handles

CONTROL = 0
ANSWER_S_MAX = 3.0
"""How long the daemon may take to accept the connection, or to answer."""
UNHEARD_S_MAX = 2.0
"""How long sent bytes may stay unacknowledged by the daemon's host."""
REPORT_S_MAX = 60.0
"""How long an end is reported: a daemon that returns later learns of it by the reconnect grace."""
STACKS_S_MAX = 1.0
"""How long the worker's process may take to write its stacks."""
STACKS_LOOK_S = 0.02
EXIT_WAIT_S_MAX = 0.05
"""How long to wait for the exit status of a process that is ending."""

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a terminal or supervisor sends to all processes: the worker may take its time to leave."""
ENDS_IT = frozenset({"version_mismatch", "client_invalid"})
STAT_BYTES_MAX = 4096
EXITING = 0x4
"""`PF_EXITING` of the kernel."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class WatchedWorker:
    """The worker's process: a pidfd, its open `/proc/PID/stat`, and a pipe that it holds open."""

    def __init__(self, pidfd: int, stat: int, control: int) -> None:
        self.over = False
        """Whether the worker has ended or wants no pulse any more."""
        self.death = ""
        """How the worker ended; empty while it lives."""
        self.leave: dict[str, Any] = {}
        """The leave that the worker could not report itself."""
        self._pidfd = pidfd
        self._stat = stat
        self._control = control
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)
        self._poll.register(control, select.POLLIN)

    def wait(self, seconds: float, line: PlainConnection | None = None) -> bool:
        """Wait for the worker or the connection; returns whether the connection is readable."""
        if line is not None:
            self._poll.register(line, select.POLLIN)
        try:
            happened = {descriptor for descriptor, _ in self._poll.poll(max(0.0, seconds) * 1000)}
        finally:
            if line is not None:
                self._poll.unregister(line)
        if self._control in happened and (leave := _leave_from(self._control)):
            self.over, self.leave = True, leave
        elif self._pidfd in happened:
            self.over, self.death = True, self._cause_of_end()
        elif self._control in happened:
            self._let_go()
        return line is not None and line.fileno() in happened

    def cpu_s(self) -> float:
        """The CPU time of all threads of the worker."""
        fields = self._fields()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self._fields()[:1] in ([b"T"], [b"t"])

    def _let_go(self) -> None:
        """The pipe is closed: the worker wants no pulse, has executed another program, or is just ending."""
        self.over = True
        fields = self._fields()
        if not fields or int(fields[6]) & EXITING:
            self._poll.unregister(self._control)
            self._poll.poll(EXIT_WAIT_S_MAX * 1000)
            self.death = self._cause_of_end()

    def _cause_of_end(self) -> str:
        fields = self._fields()
        # The exit status is readable until the parent process has reaped the worker.
        if not fields or fields[0] != b"Z":
            return "its process has ended"
        code = os.waitstatus_to_exitcode(int(fields[49]))
        if code >= 0:
            return f"its process has ended with exit code {code}"
        known = {number.value: number.name for number in signal.Signals}
        return f"its process was killed by {known.get(-code, f'signal {-code}')}"

    def _fields(self) -> list[bytes]:
        """The fields of `/proc/PID/stat` from the state on; empty for a process that is gone."""
        try:
            text = os.pread(self._stat, STAT_BYTES_MAX, 0)
        except ProcessLookupError:
            return []
        # The process name before may contain spaces and parentheses.
        return text[text.rindex(b")") + 1 :].split()


class PulseReporter:
    """Reports about one worker to the daemon."""

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
        self._line: PlainConnection | None = None
        self._pauses = REJOINING.delays(_chance)
        self._stacks: tuple[int, int, int] = orders.get("stacks", (-1, -1, 0))
        """The memory for the worker's stacks, its open status file, and the signal that writes them; 0 for none."""

    def speak(self) -> None:
        """Report that the worker lives, and then its end; return early if the daemon refuses the worker."""
        while not self._worker.over:
            try:
                self._beat(self._line or self._connect())
            except ForgedError as error:
                self._worker.wait(self._lose(error))
        if self._worker.leave:
            self._report("LeaveJob", **self._worker.leave)
        elif self._worker.death:
            self._report("ReportDeath", reason=self._worker.death)
        if self._line is not None:
            self._line.close()

    def _beat(self, line: PlainConnection) -> None:
        """Send one pulse, and read from the daemon until the next is due."""
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

    def _dump_stacks(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have the worker's process write its stacks, and read them."""
        memory, status, number = self._stacks
        if not number:
            return {"text": "", "reason": "no signal was free for it in the worker's process"}
        if self._worker.is_stopped:
            return {"text": "", "reason": "the worker's process is stopped by a signal or a debugger"}
        if not handles(status, number):
            return {"text": "", "reason": f"the worker's process has given up its handler of signal {number}"}
        os.ftruncate(memory, 0)
        # The position is shared with the worker, which writes from there.
        os.lseek(memory, 0, os.SEEK_SET)
        try:
            self._worker.send_signal(number)
        except OSError as error:
            return {"text": "", "reason": f"the worker's process could not be signalled: {error.strerror}"}
        size = self._written_size(memory)
        text = os.pread(memory, STACKS_BYTES_MAX, 0).decode(errors="replace")
        if not size:
            said = f"the worker's process has written nothing within {STACKS_S_MAX:g} s; it may wait for a device"
            return {"text": "", "reason": said}
        is_cut = size > STACKS_BYTES_MAX
        return {"text": text, "reason": f"cut after {STACKS_BYTES_MAX} of {size} bytes" if is_cut else ""}

    def _written_size(self, memory: int) -> int:
        """How much was written, once nothing more comes."""
        give_up_at, size = self._now() + STACKS_S_MAX, 0
        while self._now() < give_up_at:
            self._sleep(STACKS_LOOK_S)
            before, size = size, os.fstat(memory).st_size
            if size and size == before:
                break
        return size

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

    def _connect(self) -> PlainConnection:
        self._line = PlainConnection(next(self._endpoints), self._token, ANSWER_S_MAX, program="forged-pulse")
        self._line.set_user_timeout(UNHEARD_S_MAX)
        self._line.served = {"DumpStacks": self._dump_stacks}
        # Data that arrived together with the welcome would not make the socket readable again.
        self._line.process_incoming()
        return self._line

    def _lose(self, error: ForgedError) -> float:
        """Drop the connection; returns the pause before the next, or raises an error that is not retryable."""
        if self._line is not None:
            self._line.drop()
            self._line = None
        if isinstance(error, RequestRefused) or error.code in ENDS_IT:
            raise error
        return next(self._pauses)


def _chance() -> float:
    return os.urandom(1)[0] / 256


def read_orders(control: int) -> dict[str, Any]:
    """Read a message of the worker: its length, and a map. Raises `EOFError` if the worker has closed the pipe."""
    (size,) = struct.unpack(">I", _read(control, 4))
    orders: dict[str, Any] = msgpack.unpackb(_read(control, size))
    return orders


def _leave_from(control: int) -> dict[str, Any]:
    """The worker's leave; empty if it has only closed the pipe."""
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
    """Run the pulse of the worker that has started this process."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        orders = read_orders(CONTROL)
        worker = WatchedWorker(orders["pidfd"], orders["stat"], CONTROL)
        PulseReporter(orders, worker, Counters.attach(orders["counters"])).speak()
    except (EOFError, ForgedError):
        # The worker is gone, or the daemon refuses it: there is nothing to report to.
        sys.exit(1)
