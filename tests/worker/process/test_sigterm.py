"""SIGTERM, as workers hear it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from forged.worker.process.sigterm import heeding_sigterm, is_heeded
from tests.worker.process.test_forks import in_a_child

NOBODY_LEAVES = """
import signal
from forged.worker.process.sigterm import heeding_sigterm

with heeding_sigterm(lambda: False):
    signal.raise_signal(signal.SIGTERM)
    print("it was not heeded")
"""


class SigtermHandler:
    """A handler that notes SIGTERM and says whether a worker leaves."""

    def __init__(self, *, leaves: bool = True) -> None:
        self.times = 0
        self._leaves = leaves

    def __call__(self) -> bool:
        self.times += 1
        return self._leaves


def test_all_workers_of_a_process_receive_sigterm() -> None:
    some = [SigtermHandler(), SigtermHandler(leaves=False), SigtermHandler()]
    with heeding_sigterm(some[0]), heeding_sigterm(some[1]), heeding_sigterm(some[2]):
        signal.raise_signal(signal.SIGTERM)
    assert [one.times for one in some] == [1, 1, 1]


def test_sigterm_is_handled_until_the_last_worker_has_left() -> None:
    first, second = heeding_sigterm(lambda: True), heeding_sigterm(lambda: True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_heeded()
    second.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_without_a_leaving_worker_has_its_default_effect() -> None:
    done = subprocess.run([sys.executable, "-c", NOBODY_LEAVES], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_handler_of_the_script_is_kept(when: str) -> None:
    def own(number: int, frame: object) -> None:
        return

    if when == "before":
        signal.signal(signal.SIGTERM, own)
    try:
        with heeding_sigterm(lambda: True):
            if when == "meanwhile":
                signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_no_handler_is_installed_outside_the_main_thread() -> None:
    heeded: list[bool] = []

    def script() -> None:
        with heeding_sigterm(lambda: True):
            heeded.append(is_heeded())

    thread = threading.Thread(target=script)
    thread.start()
    thread.join()
    assert heeded == [False]


def test_sigterm_ends_a_forked_child_and_not_its_parent() -> None:
    told = SigtermHandler()
    with heeding_sigterm(told):
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        in_a_child(lambda: None if not is_heeded() else os._exit(1))
        assert is_heeded()
    assert told.times == 0


def test_sigterm_reaches_the_worker_of_a_forked_child_and_not_the_one_of_its_parent() -> None:
    of_the_parent, of_the_child = SigtermHandler(), SigtermHandler()

    def check() -> None:
        with heeding_sigterm(of_the_child):
            signal.raise_signal(signal.SIGTERM)
        assert (of_the_child.times, of_the_parent.times) == (1, 0)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    with heeding_sigterm(of_the_parent):
        in_a_child(check)
