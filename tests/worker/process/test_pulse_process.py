"""What the pulse knows of the worker, and how long it goes on telling."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import msgpack
import pytest

from forged.errors import ForgedError, RequestRefused
from forged.retry import REJOINING
from forged.worker.process import pulse_process
from forged.worker.process.counters import Counters
from forged.worker.process.pulse_process import REPORT_S_MAX, PulseReporter, WatchedWorker, read_orders
from tests.worker.recording_daemon import INCARNATION, INTERVAL_S, PATIENCE_S

NAMED_BADLY = "open('/proc/self/comm', 'w').write('x) R 1 (('); print(flush=True); input()"
NOBODY = "unix:///nowhere/at/all"
LONGEST_PAUSE_S = REJOINING.delay_max_s
Watched = tuple[subprocess.Popen[bytes], WatchedWorker, int]


@contextmanager
def watched(
    program: str = "print(flush=True); input()",
) -> Iterator[Watched]:
    """A waiting process, its watcher, and the end of the pipe that it would hold."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pidfd, stat = os.pidfd_open(process.pid), os.open(f"/proc/{process.pid}/stat", os.O_RDONLY)
        heard, control = os.pipe()
        try:
            yield process, WatchedWorker(pidfd, stat, heard), control
        finally:
            process.kill()
            for descriptor in (pidfd, stat, heard):
                os.close(descriptor)


def ended(process: subprocess.Popen[bytes]) -> None:
    """Wait until it has ended, without asking how: it stays a zombie."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


class TestWatching:
    def test_living_process_is_not_over(self) -> None:
        with watched() as (_, worker, control):
            assert not worker.wait(0.0)
            assert not worker.over
            os.close(control)

    def test_exit_status_of_a_zombie_is_known(self) -> None:
        with watched() as (process, worker, control):
            process.kill()
            ended(process)
            worker.wait(PATIENCE_S)
            assert (worker.over, worker.death) == (True, "its process was killed by SIGKILL")
            os.close(control)

    def test_exit_status_of_a_reaped_process_is_unknown(self) -> None:
        with watched() as (process, worker, control):
            process.kill()
            process.wait()
            worker.wait(PATIENCE_S)
            assert (worker.over, worker.death) == (True, "its process has ended")
            assert worker.cpu_s() == 0.0
            os.close(control)

    def test_process_name_that_resembles_proc_fields_is_parsed(self) -> None:
        with watched(NAMED_BADLY) as (process, worker, control):
            assert "x) R 1 ((" in Path(f"/proc/{process.pid}/stat").read_text()
            process.send_signal(signal.SIGTERM)
            ended(process)
            worker.wait(PATIENCE_S)
            assert worker.death == "its process was killed by SIGTERM"
            os.close(control)

    def test_live_process_that_closed_the_pipe_needs_no_pulse(self) -> None:
        with watched() as (_, worker, control):
            os.close(control)
            worker.wait(PATIENCE_S)
            assert (worker.over, worker.death) == (True, "")

    def test_process_that_wrote_to_the_pipe_has_left(self) -> None:
        words = msgpack.packb({"reason": "SIGTERM"})
        with watched() as (process, worker, control):
            os.write(control, struct.pack(">I", len(words)) + words)
            os.close(control)
            process.kill()
            ended(process)
            worker.wait(PATIENCE_S)
            assert (worker.over, worker.death, worker.leave) == (True, "", {"reason": "SIGTERM"})

    def test_process_that_closed_the_pipe_by_ending_is_dead(self) -> None:
        """As the kernel closes files before a process has ended, this may be seen before."""
        with watched() as (process, worker, control):
            process.kill()
            ended(process)
            os.close(control)
            worker._poll.unregister(worker._pidfd)
            worker.wait(PATIENCE_S)
            assert (worker.over, worker.death) == (True, "its process was killed by SIGKILL")


class TestReporting:
    @pytest.fixture
    def make_pulse(self) -> Iterator[Callable[..., PulseReporter]]:
        """Makes the pulse of a worker that has died."""
        about = {"job": "run", "worker_id": "w1", "incarnation": INCARNATION}
        orders = about | {"endpoints": [NOBODY], "token": None, "interval_s": INTERVAL_S}
        with watched() as (process, worker, control), closing(Counters.create()) as counters:
            process.kill()
            process.wait()
            yield partial(PulseReporter, orders, worker, counters)
            os.close(control)

    def test_death_without_a_daemon_is_reported_for_report_s_max(
        self, make_pulse: Callable[..., PulseReporter]
    ) -> None:
        """The clock is the test's: each pause takes as long as it is, and no time."""
        pauses: list[float] = []
        dead = make_pulse(now=lambda: sum(pauses), sleep=pauses.append)
        dead.speak()
        assert REPORT_S_MAX - LONGEST_PAUSE_S < sum(pauses) <= REPORT_S_MAX

    def test_final_connection_error_ends_the_pulse(
        self, make_pulse: Callable[..., PulseReporter], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: object, **options: object) -> None:
            raise RequestRefused("token_unknown", "no")

        monkeypatch.setattr(pulse_process, "PlainConnection", refuse)
        with pytest.raises(ForgedError, match="no"):
            make_pulse().speak()


class TestStartupSettings:
    def test_settings_are_read_completely(self) -> None:
        heard, control = os.pipe()
        payload = msgpack.packb({"token": "t"})
        os.write(control, struct.pack(">I", len(payload)) + payload)
        assert read_orders(heard) == {"token": "t"}
        os.close(heard)
        os.close(control)

    @pytest.mark.parametrize("written", [b"", b"\0\0", b"\0\0\0\7", b"\0\0\0\7\x81"])
    def test_settings_of_a_worker_that_died_while_writing_are_ignored(self, written: bytes) -> None:
        heard, control = os.pipe()
        os.write(control, written)
        os.close(control)
        with pytest.raises(EOFError):
            read_orders(heard)
        os.close(heard)


def test_pulse_process_without_settings_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: dict[int, Callable[[], None] | int] = {}
    heard, control = os.pipe()
    os.close(control)
    monkeypatch.setattr(pulse_process, "CONTROL", heard)
    monkeypatch.setattr(signal, "signal", ignored.__setitem__)
    with pytest.raises(SystemExit):
        pulse_process.main()
    assert set(ignored) == set(pulse_process.IGNORED)
    os.close(heard)
