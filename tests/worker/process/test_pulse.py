"""The pulse of a worker, which says what the worker cannot."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest

import forged
from forged.clock import SystemClock
from forged.errors import Unavailable
from forged.net.protocol.messages import Failure
from forged.plain_client.connection import PlainConnection
from forged.worker.process import pulse as pulses
from forged.worker.process.counters import Counters
from forged.worker.process.pulse import FLAGS, PulseKeeper, PulseProcess
from tests.client.threaded_daemon import ThreadedDaemon
from tests.net.manual_daemon import ManualClock
from tests.telemetry.recording_log import RecordingLog
from tests.worker.process.test_forks import in_a_child
from tests.worker.recording_daemon import (
    INCARNATION,
    INTERVAL_S,
    PATIENCE_S,
    RecordingDaemon,
    is_over,
    pulse_worker,
    state,
)

KILLS = 5
STARTS = 100
NOBODY = "unix:///nowhere/at/all"
HOLD_THE_GIL = """
def count():
    while True:
        counters.marks += 1
threading.Thread(target=count, daemon=True).start()
import re
re.match("(a+)+$", "a" * 64 + "b")
"""
"""A thread counts until the one call into C begins, which never ends and never lets go of the GIL."""
HEAVY = {"anyio", "asyncio", "json", "logging", "msgspec", "random", "ssl", "subprocess", "tempfile", "threading"}


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[RecordingDaemon]:
    recorder = RecordingDaemon(tmp_path / "daemon")
    yield recorder
    recorder.end()


@pytest.fixture
def counters() -> Iterator[Counters]:
    with closing(Counters.create()) as counters:
        yield counters


def started(endpoint: str, counters: Counters, token: str | None = None) -> PulseProcess:
    """A pulse of this very process."""
    return PulseProcess.start([endpoint], "run", "w1", INCARNATION, token, counters, interval_s=INTERVAL_S)


def own_descriptors() -> set[str]:
    return {one.name for one in Path("/proc/self/fd").iterdir()}


def ended_by_itself(pulse: PulseProcess) -> bool:
    pidfd = os.pidfd_open(pulse.pid)
    try:
        return is_over(pidfd, PATIENCE_S) and not pulse.alive
    finally:
        os.close(pidfd)


class TestLiveWorker:
    def test_pulse_reports_the_worker_and_its_counters(
        self, recorder: RecordingDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORGED_TOKEN", "forged_token")
        with pulse_worker(recorder.endpoint):
            hello = recorder.next("Hello").body
            said = recorder.next("Pulse").body
        assert hello["agent"].startswith("forged-pulse/")
        assert hello["token"] == "forged_token"
        cpu_s = said.pop("cpu_s")
        about = {"job": "run", "worker_id": "w1", "incarnation": INCARNATION}
        assert said == {**about, "step": 3, "collective_seq": 7, "interval_s": INTERVAL_S}
        assert 0.0 < cpu_s < PATIENCE_S

    def test_pulse_interval_follows_the_worker(self, recorder: RecordingDaemon, counters: Counters) -> None:
        with closing(started(recorder.endpoint, counters)):
            assert recorder.next("Pulse").body["interval_s"] == INTERVAL_S
            counters.pulse_interval_s = 0.125
            while (said := recorder.next("Pulse")).body["interval_s"] != 0.125:
                pass
            assert recorder.next("Pulse").at - said.at >= 0.1

    def test_pulse_continues_while_the_gil_is_held(self, recorder: RecordingDaemon) -> None:
        with pulse_worker(recorder.endpoint, HOLD_THE_GIL):
            marks, cpu_s = -1, recorder.next("Pulse").body["cpu_s"]
            # Once two pulses tell the same, no thread of Python has run in between.
            while (said := recorder.next("Pulse").body)["collective_seq"] != marks:
                marks = said["collective_seq"]
            while (later := recorder.next("Pulse").body)["cpu_s"] <= max(cpu_s, said["cpu_s"]):
                assert later["collective_seq"] == marks

    def test_a_stopped_worker_is_not_dead(self, recorder: RecordingDaemon) -> None:
        with pulse_worker(recorder.endpoint) as worker:
            recorder.next("Pulse")
            os.kill(worker.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
            recorder.forget()
            used = {recorder.next("Pulse").body["cpu_s"] for _ in range(20)}
            assert state(worker.pid) == "T"
            assert len(used) == 1
            os.kill(worker.pid, signal.SIGCONT)
            worker.kill()
            assert recorder.next("ReportDeath")

    def test_signals_to_the_process_group_do_not_end_the_pulse(self, recorder: RecordingDaemon) -> None:
        with pulse_worker(recorder.endpoint) as worker:
            recorder.next("Pulse")
            assert os.getsid(worker.pulse) == worker.pulse
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                os.kill(worker.pulse, number)
            recorder.forget()
            recorder.next("Pulse")

    def test_pulse_reconnects_to_a_restarted_daemon(self, recorder: RecordingDaemon) -> None:
        with pulse_worker(recorder.endpoint):
            recorder.next("Pulse")
            recorder.close()
            recorder.forget()
            recorder.open()
            recorder.next("Hello")
            recorder.next("Pulse")

    def test_pulse_switches_to_the_next_endpoint(self, recorder: RecordingDaemon, counters: Counters) -> None:
        endpoints = [NOBODY, "no endpoint", recorder.endpoint]
        with closing(PulseProcess.start(endpoints, "run", "w1", INCARNATION, None, counters, interval_s=INTERVAL_S)):
            assert recorder.next("Pulse")

    def test_pulse_may_start_before_the_daemon(self, recorder: RecordingDaemon, counters: Counters) -> None:
        recorder.close()
        with closing(started(recorder.endpoint, counters)) as pulse:
            assert pulse.alive
            recorder.open()
            assert recorder.next("Pulse")

    def test_pulse_answers_pings(self, recorder: RecordingDaemon) -> None:
        """Between two pulses, which here are an hour apart."""

        async def ping(connection: Any) -> None:
            from forged.net.protocol.messages import Ping

            await connection.accept_hello()
            await connection.receive()
            connection.send(Ping(7))
            answer = await connection.receive()
            recorder.messages.put((0.0, type(answer).__name__, {"nonce": answer.nonce}))  # type: ignore[arg-type]

        recorder._serve = ping  # type: ignore[method-assign]
        recorder.close()
        recorder.open()
        with pulse_worker(recorder.endpoint, interval_s=3600.0):
            _, name, body = recorder.messages.get(timeout=PATIENCE_S)
        assert (name, body) == ("Pong", {"nonce": 7})


class TestDeadWorker:
    def test_kill_is_reported_with_its_signal(self, recorder: RecordingDaemon) -> None:
        """The time from the kill to the report is printed; how soon that is depends on the machine."""
        taken_s = []
        for _ in range(KILLS):
            with pulse_worker(recorder.endpoint) as worker:
                recorder.next("Pulse")
                killed_at = worker.kill()
                report = recorder.next("ReportDeath")
                taken_s.append(report.at - killed_at)
                assert worker.pulse_is_gone()
            assert report.body == {
                "job": "run",
                "worker_id": "w1",
                "incarnation": INCARNATION,
                "reason": "its process was killed by SIGKILL",
            }
        print(f"from kill -9 to the report: median {statistics.median(taken_s) * 1e3:.1f} ms of {KILLS}")

    def test_pulse_acknowledges_the_reply_before_it_ends(self, recorder: RecordingDaemon) -> None:
        with pulse_worker(recorder.endpoint) as worker:
            recorder.next("Pulse")
            worker.kill()
            recorder.next("ReportDeath")
            assert recorder.next("Bye")

    @pytest.mark.parametrize(
        ("way", "reason"),
        [
            ("pass", "its process has ended with exit code 0"),
            ("raise SystemExit(3)", "its process has ended with exit code 3"),
            ("os._exit(4)", "its process has ended with exit code 4"),
            ("os.kill(os.getpid(), signal.SIGTERM)", "its process was killed by SIGTERM"),
            ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", f"its process was killed by signal {signal.SIGRTMIN + 1}"),
        ],
    )
    def test_worker_that_exits_is_reported(self, recorder: RecordingDaemon, way: str, reason: str) -> None:
        with pulse_worker(recorder.endpoint, way) as worker:
            assert recorder.next("ReportDeath").body["reason"] == reason
            assert worker.pulse_is_gone()

    def test_death_of_a_worker_with_living_children_is_reported(self, recorder: RecordingDaemon) -> None:
        way = "child = os.fork(); child and print(child, flush=True); signal.pause()"
        with pulse_worker(recorder.endpoint, way) as worker:
            child = int(worker.stdout.readline())
            worker.kill()
            assert recorder.next("ReportDeath")
            os.kill(child, signal.SIGKILL)

    def test_signal_to_the_process_group_does_not_prevent_the_report(self, recorder: RecordingDaemon) -> None:
        with pulse_worker(recorder.endpoint) as worker:
            os.killpg(worker.pid, signal.SIGKILL)
            assert recorder.next("ReportDeath")

    def test_death_is_reported_when_the_daemon_is_back(self, recorder: RecordingDaemon) -> None:
        with pulse_worker(recorder.endpoint) as worker:
            recorder.next("Pulse")
            recorder.close()
            worker.kill()
            worker.process.wait()
            assert not worker.pulse_is_gone(0.0)
            recorder.open()
            # The parent process has reaped it, so the exit status cannot be read any more.
            assert recorder.next("ReportDeath").body["reason"].startswith("its process ")
            assert worker.pulse_is_gone()

    def test_undelivered_leave_request_is_delivered_when_the_daemon_is_back(self, recorder: RecordingDaemon) -> None:
        words = (
            "pulse.leave_through_pulse({'reason': 'SIGTERM', 'step': 7}); pulse.close(); print(pulse.alive, flush=True)"
        )
        recorder.close()
        with pulse_worker(recorder.endpoint, f"{words}; signal.pause()") as worker:
            assert worker.stdout.readline() == "True\n"
            worker.kill()
            recorder.open()
            left = recorder.next("LeaveJob").body
            assert (left["worker_id"], left["incarnation"]) == ("w1", INCARNATION)
            assert (left["reason"], left["step"]) == ("SIGTERM", 7)
            assert worker.pulse_is_gone()

    def test_unanswered_report_is_repeated(self, recorder: RecordingDaemon) -> None:
        """An answer that says "later" is none."""
        with pulse_worker(recorder.endpoint) as worker:
            recorder.next("Pulse")
            recorder.refusals["ReportDeath"] = Failure(1, "unavailable", "starting", "not yet")
            worker.kill()
            recorder.next("ReportDeath")
            recorder.next("ReportDeath")
            recorder.refusals.clear()
            assert worker.pulse_is_gone()

    def test_output_of_the_worker_ends_with_the_worker(self, recorder: RecordingDaemon) -> None:
        """`train | tee log` is not kept waiting by a pulse that cannot report."""
        with pulse_worker(recorder.endpoint) as worker:
            recorder.next("Pulse")
            recorder.close()
            worker.kill()
            assert worker.stdout.read() == ""
            assert not worker.pulse_is_gone(0.0)


class TestSilence:
    def test_closed_pulse_reports_nothing_and_leaks_nothing(self, recorder: RecordingDaemon) -> None:
        with pulse_worker(recorder.endpoint, "pulse.close(); pulse.close(); print(pulse.alive, flush=True)") as worker:
            assert worker.stdout.readline() == "False\n"
            assert worker.pulse_is_gone(0.0)
            worker.process.wait()
        assert "ReportDeath" not in {message.name for message in list(recorder.messages.queue)}

    def test_worker_that_execs_is_not_reported_dead(self, recorder: RecordingDaemon) -> None:
        with pulse_worker(recorder.endpoint, "os.execv('/bin/sleep', ['sleep', '3600'])") as worker:
            assert worker.pulse_is_gone()
            assert worker.process.poll() is None
        assert "ReportDeath" not in {message.name for message in list(recorder.messages.queue)}

    @pytest.mark.parametrize(
        ("kind", "code"), [("refused", "token_unknown"), ("peer", "version_mismatch"), ("peer", "client_invalid")]
    )
    def test_daemon_that_refuses_the_pulse_is_not_retried(
        self, recorder: RecordingDaemon, counters: Counters, kind: str, code: str
    ) -> None:
        recorder.refusals["Hello"] = Failure(0, kind, code, "no")
        with closing(started(recorder.endpoint, counters)) as pulse:
            assert ended_by_itself(pulse)

    def test_daemon_without_death_reports_gets_one_report(self, recorder: RecordingDaemon) -> None:
        recorder.refusals["ReportDeath"] = Failure(1, "refused", "request_unknown", "no answer to that")
        with pulse_worker(recorder.endpoint) as worker:
            recorder.next("Pulse")
            worker.kill()
            assert worker.pulse_is_gone()
        assert [said.name for said in list(recorder.messages.queue)].count("ReportDeath") == 1


class TestStarting:
    def test_pulse_inherits_only_the_watched_descriptors(self, recorder: RecordingDaemon) -> None:
        way = (
            "import socket; kept = socket.socketpair(); print(*(os.fstat(end.fileno()).st_ino for end in kept), "
            "flush=True); pulse.close(); from forged.worker.process.pulse import PulseProcess; "
            "[end.set_inheritable(True) for end in kept]; "
            f"pulse = PulseProcess.start([{recorder.endpoint!r}], 'run', 'w2', "
            f"b'{INCARNATION.decode()}', None, counters); "
            "print(pulse.pid, flush=True); signal.pause()"
        )
        with pulse_worker(recorder.endpoint, way) as worker:
            sockets = set(worker.stdout.readline().split())
            pulse = int(worker.stdout.readline())
            while recorder.next("Pulse").body["worker_id"] != "w2":
                pass
            held = {int(one.name): str(one.readlink()) for one in Path(f"/proc/{pulse}/fd").iterdir()}
            stat = f"/proc/{worker.pid}/stat"
            os.kill(pulse, signal.SIGKILL)
        assert held.pop(0).startswith("pipe:")
        assert (held.pop(1), held.pop(2)) == (os.devnull, os.devnull)
        kinds = {target.partition(":")[0] for target in held.values()}
        assert kinds == {"/memfd", stat, "anon_inode", "socket"}
        assert not any(f"[{number}]" in target for target in held.values() for number in sockets)

    def test_starting_and_stopping_leaks_nothing(self, counters: Counters) -> None:
        before = own_descriptors()
        for _ in range(STARTS):
            with closing(started(NOBODY, counters)) as pulse:
                pid = pulse.pid
        assert own_descriptors() == before
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert f"{pid}" not in children

    def test_pulse_that_cannot_start_is_unavailable_and_leaks_nothing(
        self, counters: Counters, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = own_descriptors()
        for executable in ("/nowhere/python", "", None):
            monkeypatch.setattr(sys, "executable", executable)
            with pytest.raises(Unavailable) as error:
                started(NOBODY, counters)
            assert error.value.code == "pulse_not_started"
        assert own_descriptors() == before

    def test_pulse_that_dies_during_startup_is_unavailable(
        self, counters: Counters, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def dead(control: int, descriptors: object) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(["/bin/true"], stdin=control)
            process.wait()
            return process

        before = own_descriptors()
        monkeypatch.setattr(pulses, "_run", dead)
        with pytest.raises(Unavailable, match="the pulse could not be started"):
            started(NOBODY, counters)
        assert own_descriptors() == before

    def test_token_is_not_visible_in_the_process_list(self, counters: Counters) -> None:
        with closing(started(NOBODY, counters, token="forged_secret")) as pulse:
            assert b"forged_secret" not in Path(f"/proc/{pulse.pid}/cmdline").read_bytes()

    def test_python_environment_variables_do_not_affect_the_pulse(
        self, recorder: RecordingDaemon, counters: Counters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "struct.py").write_text("raise SystemExit")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("PYTHONMALLOC", "nonsense")
        with closing(started(recorder.endpoint, counters)):
            assert recorder.next("Pulse")

    def test_forked_child_has_no_pulse_and_cannot_end_its_parents(
        self, recorder: RecordingDaemon, counters: Counters
    ) -> None:
        with closing(started(recorder.endpoint, counters)) as pulse:
            recorder.next("Pulse")

            def in_vain() -> None:
                assert not pulse.alive
                pulse.close()

            in_a_child(in_vain)
            recorder.forget()
            assert recorder.next("Pulse")
            assert pulse.alive

    def test_pulse_imports_no_heavy_modules(self) -> None:
        program = (
            "import sys; sys.path += sys.argv[1:]; import forged.worker.process.pulse_process; "
            "print(*{name.partition('.')[0] for name in sys.modules})"
        )
        places = [str(Path(module.__file__ or "").parents[1]) for module in (forged, msgpack)]
        command = [sys.executable, FLAGS, "-c", program, *places]
        loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert not HEAVY & set(loaded.split())


class TestReplacing:
    class Ended:
        """A pulse that has ended."""

        pid, alive = 1, False

        def close(self) -> None:
            return

    def test_ended_pulse_is_replaced_at_once_and_later_ones_after_growing_pauses(self) -> None:
        clock, starts = ManualClock(), 0

        def start() -> Any:
            nonlocal starts
            starts += 1
            return self.Ended()

        log = RecordingLog()
        heart = PulseKeeper(start, clock, lambda: 0.0, log)
        heart.look()
        assert starts == 2
        for pause_s in (1.0, 2.0, 4.0):
            clock.now += pause_s - 0.01
            heart.look()
            before = starts
            clock.now += 0.02
            heart.look()
            assert starts == before + 1
        assert log.levels("the process that reports this worker's liveness (pulse) has ended; another was started") == {
            "warning"
        }

    def test_failed_start_of_a_pulse_is_retried(self) -> None:
        clock, log = ManualClock(), RecordingLog()
        outcomes: list[Any] = [self.Ended(), Unavailable("pulse_not_started", "no"), self.Ended()]

        def start() -> Any:
            outcome = outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        heart = PulseKeeper(start, clock, lambda: 0.0, log)
        heart.look()
        assert log.levels(
            "the process that reports this worker's liveness (pulse) has ended and could not be restarted"
        ) == {"warning"}
        clock.now += 1.01
        heart.look()
        assert outcomes == []

    def test_live_pulse_is_not_replaced(self, recorder: RecordingDaemon, counters: Counters) -> None:
        heart = PulseKeeper(lambda: started(recorder.endpoint, counters), SystemClock(), lambda: 0.0, RecordingLog())
        pid = heart.pulse.pid
        heart.look()
        assert heart.pulse.pid == pid
        heart.close()


def test_real_daemon_counts_a_killed_worker_as_failed(threaded_daemon: ThreadedDaemon) -> None:
    """The worker's connection is this test's and stays, and silence is allowed: only the pulse reports the death."""
    endpoint = threaded_daemon.runner.endpoint
    with socket.create_server(("127.0.0.1", 0)) as peers, closing(PlainConnection(endpoint, None, PATIENCE_S)) as line:
        worker = {"id": "w1", "hostname": "127.0.0.1", "port": peers.getsockname()[1]}
        settings = {"stability_window_ms": 0, "worker_heartbeat_timeout_ms": round(PATIENCE_S * 1000)}
        line.request("JoinJob", job="run", worker=worker, incarnation=INCARNATION, settings=settings)
        with (
            pulse_worker(endpoint, "counters.step = 41; signal.pause()") as killed,
            closing(PlainConnection(endpoint, None, PATIENCE_S)) as news,
        ):
            while line.request("ShowWorker", job="run", worker_id="w1")["step"] != 41:
                pass
            assert news.request("ShowWorker", job="run", worker_id="w1")["cpu_s"] > 0.0
            killed.kill()
            failed = next(event for _, event in news.facts(-1, ["WorkerFailed"], ["run"]) if event)
    assert failed["fact"]["reason"] == "its process was killed by SIGKILL"
