"""Starts and stops the pulse of this process.

Invariants:
- The pulse is a program of its own and inherits only the descriptors that it watches: no socket, no lock, no
  terminal, and not the process group that gets Ctrl-C and a supervisor's signals.
- Secrets are passed through a pipe, where `ps` does not show them.
- A pulse that ends alone, killed or refused by the daemon, is replaced: without a pulse, a worker that computes with
  the GIL held looks dead.

A supervisor that kills a whole control group, or the end of a container, ends the pulse too. No process reports the
death then, and the daemon sees both connections lost.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgpack

import forged
from forged.clock import Clock
from forged.elastic.config import PULSE_INTERVAL_S
from forged.errors import Unavailable
from forged.log import Log
from forged.retry import Random, RetryPolicy
from forged.worker.process.counters import Counters
from forged.worker.process.forks import ForkGuard
from forged.worker.process.stack_dump import StackDump

REPLACING = RetryPolicy(attempts=None, delay_s=1.0, exponential=True, delay_max_s=60.0, jitter=0.5)
"""The pauses between replacements: a start costs as much as starting Python."""
FLAGS = "-sSP"
"""No import paths besides the named ones: looking for packages costs more than the rest of the start."""
_reporting_leave: list[subprocess.Popen[bytes]] = []
"""Pulses that still report a worker's leave; those that have ended are reaped at the next start."""
PROGRAM = "import sys; sys.path += sys.argv[1:]; from forged.worker.process.pulse_process import main; main()"


class PulseProcess:
    """The pulse process of this process; made by `PulseProcess.start`."""

    def __init__(self, process: subprocess.Popen[bytes], control: int) -> None:
        self._process = process
        # A plain number: a file object would be closed early in the interpreter's shutdown, and end the pulse then.
        self._control = control
        # A forked child that holds the pipe would keep the pulse alive.
        self._guard = ForkGuard(lambda: [self._control])

    @classmethod
    def start(
        cls,
        endpoints: Sequence[str],
        job: str,
        worker_id: str,
        incarnation: bytes,
        token: str | None,
        counters: Counters,
        stacks: StackDump | None = None,
        *,
        interval_s: float = PULSE_INTERVAL_S,
    ) -> Self:
        """Start a process that reports to the daemon that this one lives, and when it has ended.

        TLS is configured by the environment: `$FORGED_CA`, `$FORGED_CERTIFICATE`, `$FORGED_KEY`.
        """
        _reporting_leave[:] = [process for process in _reporting_leave if process.poll() is None]
        with _not_started():
            heard, control = os.pipe()
            try:
                with _of_this_process() as (pidfd, stat):
                    shared = () if stacks is None else (stacks.descriptor, stacks.status)
                    process = _run(heard, (pidfd, stat, counters.descriptor, *shared))
            except BaseException:
                os.close(control)
                raise
            finally:
                os.close(heard)
            pulse = cls(process, control)
            orders = {
                "endpoints": list(endpoints),
                "job": job,
                "worker_id": worker_id,
                "incarnation": incarnation,
                "token": token,
                "interval_s": interval_s,
                "pidfd": pidfd,
                "stat": stat,
                "counters": counters.descriptor,
                "stacks": (-1, -1, 0) if stacks is None else (stacks.descriptor, stacks.status, stacks.number),
            }
            pulse._order(msgpack.packb(orders))
        return pulse

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the pulse is running; it ends when the daemon refuses this worker."""
        return not self._guard.forked and self._process.poll() is None

    def close(self) -> None:
        """End the pulse without a report. No effect in forked children, or if the pulse has yet to report a leave."""
        if self._guard.forked or self._process in _reporting_leave:
            return
        if self._control >= 0:
            os.close(self._control)
            self._control = -1
        self._guard.close()
        self._process.kill()
        self._process.wait()

    def leave_through_pulse(self, leave: Mapping[str, Any]) -> None:
        """Hand this worker's leave to the pulse, which reports it as soon as a daemon is reachable, and ends.

        No effect in forked children, and on a pulse that has ended.
        """
        if self._guard.forked or self._control < 0 or not self.alive:
            return
        # The pulse may end at this moment.
        with suppress(OSError):
            self._order(msgpack.packb(dict(leave)))
            os.close(self._control)
            self._control = -1
            self._guard.close()
            _reporting_leave.append(self._process)

    def _order(self, orders: bytes) -> None:
        try:
            os.write(self._control, struct.pack(">I", len(orders)) + orders)
        except BaseException:
            self.close()
            raise


class PulseKeeper:
    """Replaces a pulse that has ended, whenever `look` is called."""

    def __init__(self, start: Callable[[], PulseProcess], clock: Clock, random: Random, log: Log) -> None:
        self.pulse = start()
        """The newest pulse."""
        self._start = start
        self._clock = clock
        self._random = random
        self._log = log
        self._pauses = REPLACING.delays(random)
        self._again_at = clock.monotonic()
        """The time before which no other pulse is started."""

    def look(self) -> None:
        """Start another pulse if the last one has ended."""
        now = self._clock.monotonic()
        if self.pulse.alive or now < self._again_at:
            return
        if now - self._again_at > REPLACING.delay_max_s:
            # The last pulse has lived long enough to start the pauses anew.
            self._pauses = REPLACING.delays(self._random)
        self._again_at = now + next(self._pauses)
        self.pulse.close()
        try:
            self.pulse = self._start()
        except Unavailable as error:
            self._log.warning(
                "the process that reports this worker's liveness (pulse) has ended and could not be restarted",
                reason=str(error),
            )
        else:
            self._log.warning(
                "the process that reports this worker's liveness (pulse) has ended; another was started",
                pid=self.pulse.pid,
            )

    def close(self) -> None:
        self.pulse.close()


@contextmanager
def _of_this_process() -> Iterator[tuple[int, int]]:
    """Descriptors that identify this process even if its pid is reused: a pidfd and `/proc/PID/stat`."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        stat = os.open(f"/proc/{os.getpid()}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield pidfd, stat
        finally:
            os.close(stat)
    finally:
        os.close(pidfd)


def _run(control: int, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    places = {str(Path(str(module.__file__)).parents[1]): None for module in (forged, msgpack)}
    return subprocess.Popen(  # noqa: S603 - this interpreter, and the program above
        [sys.executable or "", FLAGS, "-c", PROGRAM, *places],
        stdin=control,
        # The pulse must not hold the worker's output open.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        env={name: value for name, value in os.environ.items() if not _steers_python(name)},
        start_new_session=True,
    )


def _steers_python(name: str) -> bool:
    """Whether a variable configures the worker's Python; PYTHONHOME is the same for both."""
    return name.startswith("PYTHON") and name != "PYTHONHOME"


@contextmanager
def _not_started() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(
            "pulse_not_started",
            f"the pulse could not be started: {error.strerror or error}",
            "see the limits on processes and memory",
        ) from error
