"""`forged run` under systemd: notifications, inherited sockets and environment variables."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forged.client import BlockingClient
from tests.systemd.service_manager import FakeServiceManager

ACTIVATE = shutil.which("systemd-socket-activate")
ENDS_WITHIN_S = 30.0
WATCHDOG_USEC = 300_000


@contextmanager
def started(directory: Path, *before: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The daemon in a directory, with a command before its own and more in its environment."""
    settings = directory / "forged.toml"
    settings.write_text('listen = ["tcp://127.0.0.1:0"]\n')
    command = [*before, sys.executable, "-m", "forged.cli.forged", "run", "--config", str(settings)]
    known = {name: value for name, value in os.environ.items() if not name.startswith("FORGED_")}
    places = {"STATE_DIRECTORY": str(directory / "state"), "RUNTIME_DIRECTORY": str(directory)}
    with subprocess.Popen(
        command, env=known | places | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(manager: FakeServiceManager, line: str) -> list[str]:
    """Wait for a message with this line; earlier messages must be watchdog or status messages."""
    while True:
        lines = manager.receive()
        if line in lines:
            return lines
        assert lines == ["WATCHDOG=1"] or lines[0].startswith("STATUS="), lines


def test_daemon_notifies_ready_watchdog_reload_and_stopping(manager: FakeServiceManager, tmp_path: Path) -> None:
    with started(tmp_path, **manager.environment, WATCHDOG_USEC=str(WATCHDOG_USEC)) as process:
        assert any(line.startswith("STATUS=0 jobs") for line in until(manager, "READY=1"))
        until(manager, "WATCHDOG=1")
        with BlockingClient(f"unix://{tmp_path}/forged.sock") as client:
            assert client.status().data_dir == str(tmp_path / "state")
        process.send_signal(signal.SIGHUP)
        [_, monotonic, *_] = until(manager, "RELOADING=1")
        assert monotonic.partition("=")[0] == "MONOTONIC_USEC"
        assert int(monotonic.partition("=")[2]) > 0
        until(manager, "READY=1")
        until(manager, "WATCHDOG=1")
        process.terminate()
        stopping = until(manager, "STOPPING=1")
        assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in stopping)
        process.communicate(timeout=ENDS_WITHIN_S)
        assert process.returncode == 0


def test_no_watchdog_messages_without_a_timeout(manager: FakeServiceManager, tmp_path: Path) -> None:
    with started(tmp_path, **manager.environment) as process:
        until(manager, "READY=1")
        process.terminate()
        process.communicate(timeout=ENDS_WITHIN_S)
    assert ["WATCHDOG=1"] not in manager.received()


def test_daemon_serves_with_a_watchdog_timeout_but_no_notification_socket(tmp_path: Path) -> None:
    with started(tmp_path, WATCHDOG_USEC=str(WATCHDOG_USEC)) as process:
        assert process.stdout is not None
        assert " is ready on " in process.stdout.readline()


@pytest.mark.parametrize("name", ["LISTEN_FDS", "WATCHDOG_USEC", "NOTIFY_SOCKET"])
def test_daemon_refuses_invalid_environment_variables(tmp_path: Path, name: str) -> None:
    with started(tmp_path, **{name: "nonsense"}) as process:
        _, error = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 2
    assert f"{name} must be " in error
    assert "got 'nonsense'" in error


@pytest.mark.skipif(ACTIVATE is None, reason="systemd-socket-activate is not installed")
def test_real_systemd_socket_activate_starts_the_daemon_at_a_connection(
    manager: FakeServiceManager, tmp_path: Path
) -> None:
    assert ACTIVATE is not None
    control = tmp_path / "control"
    before = [ACTIVATE, "--listen", str(control), "--setenv", f"NOTIFY_SOCKET={manager.address}"]
    for name in ("STATE_DIRECTORY", "RUNTIME_DIRECTORY", "PYTHONPATH"):
        before += ["--setenv", name]
    with started(tmp_path, *before, PYTHONPATH=str(Path(__file__).parents[2])) as process:
        assert process.stderr is not None
        assert "Listening on" in process.stderr.readline()
        with BlockingClient(f"unix://{control}") as client:
            status = client.status()
            client.create_job("a")
        assert status.socket == str(control)
        assert status.listen[0].startswith("tcp://127.0.0.1:")
        assert not (tmp_path / "forged.sock").exists()
        until(manager, "READY=1")
        process.terminate()
        process.communicate(timeout=ENDS_WITHIN_S)
        assert process.returncode == 0
    # systemd keeps the socket file: the next connection starts another daemon.
    assert control.is_socket()
