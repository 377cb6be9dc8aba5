"""Starting the pulse of this process, and stopping it.

Law: the pulse is a program of its own, and inherits what it watches and nothing else: no socket, no lock, no terminal,
no place in the group of processes that Ctrl-C and a supervisor's signals go to. What is secret is told to it through a
pipe, where `ps` does not show it.

A supervisor that kills all of a control group, or the end of a container, takes the pulse as well. Then nobody tells of
the death, and what remains is that both connections are lost. A pulse that ends alone, because somebody kills it or the
daemon does not let it in, is replaced: without one, a worker that computes with Python's lock held looks dead.
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
from forged.elastic.membership.member import PULSE_INTERVAL_S
from forged.errors import Unavailable
from forged.log import Log
from forged.retry import Random, RetryPolicy
from forged.worker.process.counters import Counters
from forged.worker.process.forks import ForkGuard

REPLACING = RetryPolicy(attempts=None, delay_s=1.0, exponential=True, delay_max_s=60.0, jitter=0.5)
"""For pulses that end: to start one costs about as much as to start Python."""
FLAGS = "-sSP"
"""No directories but those that are named: to look for packages costs more than all the rest."""
_bequeathed: list[subprocess.Popen[bytes]] = []
"""Those that have something to tell yet; who has ended is asked how, now and then, so that it goes."""
PROGRAM = "import sys; sys.path += sys.argv[1:]; from forged.worker.process.pulse_process import main; main()"


class Pulse:
    """The process that speaks for this one. `Pulse.start` starts it."""

    def __init__(self, process: subprocess.Popen[bytes], control: int) -> None:
        self._process = process
        # The number alone: an object would be closed when the interpreter ends, and the pulse would leave before that
        # is over.
        self._control = control
        # A child that holds the pipe would make the pulse believe that this process still wants it.
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
        *,
        interval_s: float = PULSE_INTERVAL_S,
    ) -> Self:
        """Have the daemon told that this process lives, and when it has ended.

        TLS goes by the environment: `$FORGED_CA`, `$FORGED_CERTIFICATE`, `$FORGED_KEY`.
        """
        _bequeathed[:] = [process for process in _bequeathed if process.poll() is None]
        with _not_started():
            heard, control = os.pipe()
            try:
                with _of_this_process() as (pidfd, stat):
                    process = _run(heard, (pidfd, stat, counters.descriptor))
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
            }
            pulse._order(msgpack.packb(orders))
        return pulse

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether there is one still: the daemon may not want to hear of this worker."""
        return not self._guard.forked and self._process.poll() is None

    def close(self) -> None:
        """This process speaks for itself again, or leaves. Nothing is said; in forked children nothing happens, nor to
        one that has yet to tell what was left to it."""
        if self._guard.forked or self._process in _bequeathed:
            return
        if self._control >= 0:
            os.close(self._control)
            self._control = -1
        self._guard.close()
        self._process.kill()
        self._process.wait()

    def bequeath(self, words: Mapping[str, Any]) -> None:
        """Have the daemon told with what this process has left, as soon as there is one; then the pulse goes by itself.

        In forked children nothing happens, nor where it has ended already.
        """
        if self._guard.forked or self._control < 0 or not self.alive:
            return
        # One that ends in this moment takes nothing more.
        with suppress(OSError):
            self._order(msgpack.packb(dict(words)))
            os.close(self._control)
            self._control = -1
            self._guard.close()
            _bequeathed.append(self._process)

    def _order(self, orders: bytes) -> None:
        try:
            os.write(self._control, struct.pack(">I", len(orders)) + orders)
        except BaseException:
            self.close()
            raise


class PulseKeeper:
    """Keeps a pulse going, for as long as somebody looks after it now and then."""

    def __init__(self, start: Callable[[], Pulse], clock: Clock, random: Random, log: Log) -> None:
        self.pulse = start()
        """The newest."""
        self._start = start
        self._clock = clock
        self._random = random
        self._log = log
        self._pauses = REPLACING.delays(random)
        self._again_at = clock.monotonic()
        """Before that, no other is started."""

    def look(self) -> None:
        """Start another if there is none any more."""
        now = self._clock.monotonic()
        if self.pulse.alive or now < self._again_at:
            return
        if now - self._again_at > REPLACING.delay_max_s:
            # The one before has lived for long enough to be no reason for a pause now.
            self._pauses = REPLACING.delays(self._random)
        self._again_at = now + next(self._pauses)
        self.pulse.close()
        try:
            self.pulse = self._start()
        except Unavailable as error:
            self._log.warning("the pulse has ended, and no other could be started", why=str(error))
        else:
            self._log.warning("the pulse has ended, and another was started", pid=self.pulse.pid)

    def close(self) -> None:
        """Nobody needs a pulse any more."""
        self.pulse.close()


@contextmanager
def _of_this_process() -> Iterator[tuple[int, int]]:
    """What stands for this process, whoever gets its number later: a pidfd, and its `/proc/PID/stat`."""
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
    return subprocess.Popen(  # noqa: S603 - this interpreter, and a program that stands above
        [sys.executable or "", FLAGS, "-c", PROGRAM, *places],
        stdin=control,
        # The worker's own output would stay open for as long as the pulse is there.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        env={name: value for name, value in os.environ.items() if not _steers_python(name)},
        start_new_session=True,
    )


def _steers_python(name: str) -> bool:
    """Whether a variable is about how the worker's program is run. Where Python itself is, is the same for both."""
    return name.startswith("PYTHON") and name != "PYTHONHOME"


@contextmanager
def _not_started() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(
            "pulse_not_started",
            f"no pulse could be started: {error.strerror or error}",
            "see the limits on processes and memory",
        ) from error
