"""Forked children let go of what is their parent's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forged.errors import RequestRefused
from forged.worker.process.forks import ForkGuard

HOLDER = """
import os, signal, socket, sys
from forged.worker.process.forks import ForkGuard

line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
guard = ForkGuard(lambda: [line.fileno()]) if sys.argv[2] == "guarded" else None
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    signal.pause()
signal.pause()
"""
"""A process with a connection and a child that lives on."""


def in_a_child(check: Callable[[], object]) -> None:
    """Have something checked in a forked child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def is_nothing(descriptor: int) -> bool:
    return os.path.samestat(os.fstat(descriptor), Path(os.devnull).stat())


@pytest.mark.parametrize("held", ["guarded", "unguarded"])
def test_connection_of_a_killed_process_ends_while_its_child_lives(held: str) -> None:
    """Without a guard the child keeps the connection open, which is what the guard is for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", HOLDER, f"{server.getsockname()[1]}", held]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            connection, _ = server.accept()
            assert process.stdout is not None
            child = int(process.stdout.readline())
            process.kill()
            process.wait()
            killed_at = time.perf_counter()
            if held == "unguarded":
                connection.setblocking(False)
                with pytest.raises(BlockingIOError):
                    connection.recv(1)
            else:
                assert connection.recv(1) == b""
                print(f"the end was seen {(time.perf_counter() - killed_at) * 1e3:.1f} ms after it was reaped")
                os.kill(child, 0)
            os.kill(child, signal.SIGKILL)
            connection.close()


def test_parent_keeps_its_sockets_open() -> None:
    ours, theirs = socket.socketpair()
    guard = ForkGuard(lambda: [ours.fileno()])

    def closed() -> None:
        assert is_nothing(ours.fileno())

    in_a_child(closed)
    ours.sendall(b"still here")
    assert theirs.recv(16) == b"still here"
    guard.check()
    guard.close()
    ours.close()
    theirs.close()


def test_use_in_a_child_is_refused_with_a_fix() -> None:
    guard = ForkGuard(list)

    def refused() -> None:
        with pytest.raises(RequestRefused, match="was forked") as error:
            guard.check()
        assert error.value.code == "worker_forked"
        assert error.value.fix

    in_a_child(refused)
    guard.check()
    guard.close()


def test_late_close_of_a_descriptor_closes_no_other_file() -> None:
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    guard = ForkGuard(lambda: [number])

    def numbers_stay_taken() -> None:
        opened = os.open("/proc/self/stat", os.O_RDONLY)
        assert opened != number
        ours.close()
        os.fstat(opened)

    in_a_child(numbers_stay_taken)
    guard.close()
    ours.close()
    theirs.close()


def test_error_in_one_guard_does_not_leave_other_sockets_open() -> None:
    ours, theirs = socket.socketpair()

    def broken() -> list[int]:
        raise RuntimeError

    gone = os.dup(ours.fileno())
    os.close(gone)
    guards = [ForkGuard(broken), ForkGuard(lambda: [-1, gone, ours.fileno()])]

    def closed() -> None:
        assert is_nothing(ours.fileno())
        assert all(guard.forked for guard in guards)
        with pytest.raises(OSError):
            os.fstat(gone)

    in_a_child(closed)
    for guard in guards:
        guard.close()
    ours.close()
    theirs.close()


def test_sockets_are_closed_without_a_free_descriptor() -> None:
    import resource

    ours, theirs = socket.socketpair()
    guard = ForkGuard(lambda: [ours.fileno()])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))

    def closed() -> None:
        with pytest.raises(OSError):
            os.fstat(ours.fileno())

    try:
        in_a_child(closed)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    guard.close()
    ours.close()
    theirs.close()


def test_released_sockets_are_not_closed_in_children() -> None:
    ours, theirs = socket.socketpair()
    guard = ForkGuard(lambda: [ours.fileno()])
    guard.close()
    guard.close()

    def open_still() -> None:
        ours.sendall(b"from the child")

    in_a_child(open_still)
    assert theirs.recv(16) == b"from the child"
    ours.close()
    theirs.close()


def test_children_of_children_close_nothing_again() -> None:
    ours, theirs = socket.socketpair()
    guard = ForkGuard(lambda: [ours.fileno()])

    def reuse() -> None:
        number = ours.detach()
        mine, _ = socket.socketpair()
        os.dup2(mine.fileno(), number)
        in_a_child(lambda: socket.socket(fileno=number))

    in_a_child(reuse)
    guard.close()
    ours.close()
    theirs.close()
