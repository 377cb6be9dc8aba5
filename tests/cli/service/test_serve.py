"""The daemon as a process: start, resources, signals and end."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from forged.cli import forged
from forged.cli.service import serve
from forged.client import BlockingClient
from forged.client.client import EARLIEST
from forged.config import Config
from forged.errors import RequestRefused
from forged.kernel.messages import Record
from forged.plain_client.connection import SUBSCRIBE, PlainConnection
from forged.status.model import DaemonStarted, DaemonStopping
from tests.cli.service.test_check_config import BAD_CONFIG, BAD_KEYS
from tests.client.threaded_daemon import ThreadedDaemon
from tests.net.recording_connections import Certificates
from tests.processes.daemon import DaemonProcess

Start = Callable[..., tuple[int, str]]


@pytest.fixture
def start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Start:
    """Runs a daemon in this process for a start that fails; returns the exit code and the error text."""

    def run(*flags: str, **places: object) -> tuple[int, str]:
        given = {"data-dir": tmp_path / "data", "socket": tmp_path / "s", "listen": "127.0.0.1:0"}
        given |= {name.replace("_", "-"): place for name, place in places.items()}
        code = forged.main(["run", *flags, *(part for key, one in given.items() for part in (f"--{key}", str(one)))])
        said = capsys.readouterr()
        assert said.out == ""
        return code, said.err

    return run


class TestFileLimit:
    """How many files the system lets a process open decides how many connections there may be."""

    @pytest.fixture
    def limits(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """The soft and the hard limit; the last is what holds."""
        held: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: held[-1])
        monkeypatch.setattr(resource, "setrlimit", lambda _, limit: held.append(limit))
        return held

    @pytest.mark.parametrize(
        ("before", "after", "connections"),
        [
            ((1024, 4096), (1640, 4096), 1000),
            ((1024, resource.RLIM_INFINITY), (1640, resource.RLIM_INFINITY), 1000),
            ((1640, 1640), (1640, 1640), 1000),
            ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1000),
            ((256, 884), (884, 884), 244),
            ((64, 64), (64, 64), 1),
        ],
    )
    def test_file_limit_is_raised_and_connections_fit_into_it(
        self, limits: list[tuple[int, int]], before: tuple[int, int], after: tuple[int, int], connections: int
    ) -> None:
        limits.append(before)
        files = serve.FileLimit()
        assert files.fit(Config(connections_max=1000)).connections_max == connections
        assert (limits[-1], files.allowed, files.connections_wanted) == (after, after[0], 1000)


class TestFailedStart:
    """In every case with one error that says what to do, exit code 2, and nothing left behind."""

    def test_invalid_config_lists_all_errors(self, start: Start, tmp_path: Path) -> None:
        path = tmp_path / "forged.toml"
        path.write_text(BAD_CONFIG.replace('listen = ["nowhere"]\n', ""))
        code, error = start("--config", str(path))
        assert code == 2
        assert all(key in error for key in BAD_KEYS[1:])

    def test_invalid_flag_is_refused(self, start: Start) -> None:
        code, error = start(listen="nowhere")
        assert code == 2
        assert "the command line is not a valid configuration" in error
        assert "tcp://host:port" in error

    def test_data_directory_in_use_is_refused(self, start: Start, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        with (tmp_path / "data" / serve.LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            code, error = start()
        assert code == 2
        assert f"another daemon uses {tmp_path / 'data'}" in error
        assert "another --data-dir" in error

    def test_data_directory_that_is_a_file_is_refused(self, start: Start, tmp_path: Path) -> None:
        (tmp_path / "data").write_text("not a directory")
        code, error = start()
        assert code == 2
        assert "it is not a directory" in error

    def test_data_directory_that_cannot_be_created_is_refused(self, start: Start) -> None:
        code, error = start(data_dir="/proc/forged")
        assert code == 2
        assert "/proc/forged" in error
        assert "set --data-dir to a writable directory" in error

    @pytest.mark.skipif(os.getuid() == 0, reason="nothing is forbidden to root")
    def test_data_directory_without_write_permission_is_refused(self, start: Start, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir(mode=0o500)
        code, error = start()
        assert code == 2
        assert "Permission denied" in error

    def test_corrupt_database_is_refused(self, start: Start, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        database = tmp_path / "data" / serve.DATABASE
        database.write_bytes(b"no database" * 1000)
        code, error = start()
        assert code == 2
        assert f"store {database} is corrupt" in error
        assert "restore a backup" in error
        assert database.read_bytes() == b"no database" * 1000

    def test_port_in_use_is_refused(self, start: Start, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            code, error = start(listen=f"127.0.0.1:{port}")
        assert code == 2
        assert error.endswith(
            f"forged: cannot listen at tcp://127.0.0.1:{port}: Address already in use"
            " (stop the process that listens there, or use another port)\n"
        )
        assert not (tmp_path / "s").exists()

    def test_socket_of_a_running_daemon_is_refused(self, start: Start, threaded_daemon: ThreadedDaemon) -> None:
        code, error = start(socket=threaded_daemon.socket)
        assert code == 2
        assert f"another process is listening at {threaded_daemon.socket}" in error
        with threaded_daemon.client() as client:
            assert client.ping() > 0

    def test_socket_path_of_another_file_is_refused(self, start: Start, tmp_path: Path) -> None:
        (tmp_path / "s").write_text("precious")
        code, error = start()
        assert code == 2
        assert "is not a socket" in error
        assert (tmp_path / "s").read_text() == "precious"

    def test_missing_certificates_are_refused(self, start: Start, tmp_path: Path) -> None:
        path = tmp_path / "forged.toml"
        path.write_text('tls_certificate = "/none/cert.pem"\ntls_key = "/none/key.pem"\n')
        code, error = start("--config", str(path))
        assert code == 2
        assert "/none/cert.pem" in error
        assert "/none/key.pem" in error

    @pytest.mark.parametrize("place", ["listen", "http"])
    def test_missing_address_may_be_retried(self, start: Start, place: str) -> None:
        code, error = start(**{place: "192.0.2.1:0"})
        assert code == 4
        assert "192.0.2.1" in error

    def test_failed_start_releases_the_data_directory(self, start: Start, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            for _ in range(2):
                code, error = start(listen=f"127.0.0.1:{taken.getsockname()[1]}")
                assert (code, "in use by" in error) == (2, False)


class TestRunning:
    def test_ready_line_names_the_endpoints(self, tmp_path: Path) -> None:
        with DaemonProcess(tmp_path) as daemon:
            assert daemon.output.startswith("forged ")
            assert f"is ready on unix://{daemon.socket}, tcp://127.0.0.1:" in daemon.output
            assert daemon.output.endswith(f"; data in {tmp_path}\n")

    def test_own_user_works_over_tcp_without_a_token_and_the_log_says_so(self, tmp_path: Path) -> None:
        with DaemonProcess(tmp_path) as daemon:
            said = daemon.wait_for("this user needs no token over TCP on this host", role="worker")
            assert said["user"] == os.getuid()
            with daemon.client() as local, BlockingClient(local.status().listen[0]) as client:
                assert client.create_job("run").name == "run"
                with pytest.raises(RequestRefused, match=f"loopback:{os.getuid()} has role worker"):
                    client.remove_job("run")

    def test_without_a_role_for_its_own_user_a_daemon_refuses_every_tcp_client_without_a_token(
        self, tmp_path: Path
    ) -> None:
        with DaemonProcess(tmp_path, own_user_loopback_role="none") as daemon, daemon.client() as local:
            address = local.status().listen[0]
            with pytest.raises(RequestRefused, match=f"user {os.getuid()}"), BlockingClient(address):
                """It does not come to this."""

    def test_flags_override_the_file_and_port_0_is_any_port(self, tmp_path: Path) -> None:
        path = tmp_path / "other.toml"
        path.write_text('data_dir = "/none"\nsocket = "/none/s"\nlisten = ["tcp://192.0.2.1:1"]\n')
        with DaemonProcess(tmp_path, "--config", str(path)) as daemon, daemon.client() as client:
            status = client.status()
            (listen,) = status.listen
            assert (status.pid, status.data_dir, status.socket) == (
                daemon.process.pid,
                str(tmp_path),
                str(daemon.socket),
            )
            assert not listen.endswith(":0")
            with BlockingClient(listen) as other:
                assert other.status().history == status.history

    def test_reload_with_connections_above_the_file_limit_is_reported(self, tmp_path: Path) -> None:
        with DaemonProcess(tmp_path) as daemon:
            resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (800, 800))
            (tmp_path / "forged.toml").write_text("connections_max = 1000\n")
            daemon.process.send_signal(signal.SIGHUP)
            told = daemon.wait_for("the limit of open files lowers connections_max", wanted=1000, open_files=800)
            assert told["connections"] == 800 - serve.FILES_BESIDES_CONNECTIONS - Config().handshakes_max
            reloaded = daemon.wait_for("fact", type="ConfigReloaded")
            assert reloaded["fact"]["changed"] == ["connections_max"]
            assert daemon.end() == (0, "", "")

    def test_moved_certificates_need_a_restart_and_do_not_fail_the_reload(self, tmp_path: Path) -> None:
        (tmp_path / "old").mkdir()
        old = {"tls_certificate": "old/localhost.pem", "tls_key": "old/localhost.key"}
        authority = Certificates(tmp_path / "old")
        authority.issue("localhost")
        written = "".join(f'{key} = "{tmp_path / path}"\n' for key, path in old.items())
        with DaemonProcess(tmp_path, **{key: str(tmp_path / path) for key, path in old.items()}) as daemon:
            (tmp_path / "old").rename(tmp_path / "new")
            moved = written.replace("/old/", "/new/")
            for log_level in ("info", "debug"):
                (tmp_path / "forged.toml").write_text(f'{moved}log_level = "{log_level}"\n')
                daemon.process.send_signal(signal.SIGHUP)
                told = daemon.wait_for("fact", type="ConfigReloaded")
                assert told["fact"]["needs_restart"] == list(old)
            assert told["fact"]["changed"] == ["log_level"]

    def test_unreadable_certificate_fails_the_reload(self, tmp_path: Path) -> None:
        certificate, key = Certificates(tmp_path).issue("localhost")
        with DaemonProcess(tmp_path, tls_certificate=str(certificate), tls_key=str(key)) as daemon:
            key.unlink()
            daemon.process.send_signal(signal.SIGHUP)
            assert "tls_key" in daemon.wait_for("fact", type="ConfigRefused")["fact"]["reason"]

    def test_stopping_daemon_ignores_reloads(self, tmp_path: Path) -> None:
        with DaemonProcess(tmp_path, log_facts_per_s_max=100_000) as daemon, blocking_reader(daemon):
            daemon.process.terminate()
            daemon.wait_for("the daemon is stopping; a second signal kills it")
            assert daemon.end(signal.SIGHUP) == (0, "", "")
        assert [line["type"] for line in daemon.log if line["event"] == "fact"][-1] == "DaemonStopping"

    @pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
    def test_signal_stops_the_daemon_cleanly(self, tmp_path: Path, name: signal.Signals) -> None:
        with DaemonProcess(tmp_path) as daemon, daemon.client() as client:
            client.create_job("a")
            assert daemon.end(name) == (0, "", "")
            assert [daemon.log[-1]["event"], daemon.log[-2]["type"]] == ["the daemon has stopped", "DaemonStopping"]
        assert not daemon.socket.exists()
        with DaemonProcess(tmp_path) as daemon, daemon.client() as client:
            assert [job.name for job in client.jobs()] == ["a"]
            facts = [item.fact for item in client.past_facts(since=EARLIEST) if isinstance(item, Record)]
            assert [type(fact) for fact in facts[-2:]] == [DaemonStopping, DaemonStarted]

    def test_client_that_does_not_read_does_not_delay_the_stop(self, tmp_path: Path) -> None:
        with DaemonProcess(tmp_path, drain_timeout_s=0.2) as daemon, blocking_reader(daemon):
            assert daemon.end() == (0, "", "")

    @pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
    def test_second_signal_stops_the_daemon_at_once(self, tmp_path: Path, name: signal.Signals) -> None:
        with DaemonProcess(tmp_path, drain_timeout_s=3600) as daemon, blocking_reader(daemon):
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_for("the daemon is stopping; a second signal kills it")
            assert daemon.end(name) == (-name, "", "")
        with DaemonProcess(tmp_path) as daemon, daemon.client() as client:
            assert [job.name for job in client.jobs()] == ["a"]

    def test_leftovers_of_kill_9_are_removed(self, tmp_path: Path) -> None:
        with DaemonProcess(tmp_path) as daemon, daemon.client() as client:
            client.create_job("a")
            daemon.end(signal.SIGKILL)
            assert daemon.socket.is_socket()
            with DaemonProcess(tmp_path) as again:
                assert [job.name for job in client.jobs()] == ["a"]
                assert again.end()[0] == 0
        assert not daemon.socket.exists()

    def test_closed_output_does_not_stop_the_daemon(self, tmp_path: Path) -> None:
        with DaemonProcess(tmp_path) as daemon:
            assert daemon.process.stdout is not None
            assert daemon.process.stderr is not None
            daemon.process.stdout.close()
            daemon.process.stderr.close()
            daemon.process.terminate()
            assert daemon.process.wait() == 0
            daemon.process.stdout = daemon.process.stderr = None


@contextmanager
def blocking_reader(daemon: DaemonProcess) -> Iterator[None]:
    """A client that requests more data than the socket buffers hold, and does not read it."""
    with daemon.client() as client:
        client.create_job("a")
        for number in range(500):
            client.note("a", f"{number} {'x' * 4000}")
    with closing(PlainConnection(f"unix://{daemon.socket}", None, 60.0)) as line:
        line._send([SUBSCRIBE, 1, EARLIEST, "", [], [], 1 << 16])
        with daemon.client() as client:
            client.ping()
        yield
