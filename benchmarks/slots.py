"""Staging into slots, and the emergency checkpoint of a worker that was killed.

A real daemon gives a real worker its slots. Staging is compared with a memcpy of the same bytes into warm memory. The
time from `kill -9` of the worker until the emergency checkpoint is durable contains the detection of the failure; it is
compared with a durable save of the same state by a worker that lives, without slots, in the same round. The kernel ends
the process when it has unmapped both slots, page by page: the time by which the checkpoint comes later than the save.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.ckpt_baseline import Baseline
from benchmarks.ckpt_comparison import Comparison, Scale, run
from benchmarks.ckpt_workload import Workload, temporary_directory
from benchmarks.harness import Figure

STAGED = 5
STAGE_AIM, EMERGENCY_AIM = 0.667, 0.77
"""At most 1.5 times a memcpy, and 1.3 times a plain durable save."""
TIMEOUT_S = 120.0
LOOK_INTERVAL_S = 0.001


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    plain = Baseline(scale.large)
    with temporary_directory() as directory, _daemon(directory) as endpoint:
        for _ in range(scale.rounds):
            _round(scale.large, directory, endpoint, plain, found)
    gib = scale.large.gib
    staging = Comparison("caller waits for staging into a slot", found["stage"])
    emergency = Comparison("from kill -9 until the emergency checkpoint is durable", found["emergency"])
    return [
        *staging.against("one memcpy into warm memory", found["memcpy"], STAGE_AIM),
        *emergency.against("a durable save without slots", found["save"], EMERGENCY_AIM),
        Figure("slots opened and staged into for the first time, per GiB", "s", min(found["first"]) / gib),
    ]


def _round(
    load: Workload, directory: Path, endpoint: str, plain: Baseline, found: defaultdict[str, list[float]]
) -> None:
    worker = Worker(endpoint, directory, load)
    found["first"].append(worker.do("stage"))
    worker.do("stage")
    for _ in range(STAGED):
        plain.copy()  # Memory that was not touched for a while is not warm.
        found["memcpy"].append(plain.copy())
        found["stage"].append(worker.do("stage"))
    found["save"].append(worker.do("save"))
    worker.do("stage")
    found["emergency"].append(worker.killed_until_saved())
    for path in directory.iterdir():
        if path.name.startswith(("plain", "emergency")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class Worker:
    """A worker process."""

    def __init__(self, endpoint: str, directory: Path, load: Workload) -> None:
        command = [sys.executable, "-m", "benchmarks.slots_worker", endpoint, str(directory), *load.arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._saved = directory / "emergency"

    def do(self, what: str) -> float:
        """The seconds that it took the worker."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the worker has ended")
        return float(line)

    def killed_until_saved(self) -> float:
        """Kill it; the seconds until its last state is durable."""
        began = time.perf_counter()
        self._process.send_signal(signal.SIGKILL)
        while not list(self._saved.glob("*.metadata.json")):
            if time.perf_counter() - began > TIMEOUT_S:
                raise SystemExit(f"no emergency checkpoint within {TIMEOUT_S:g} s")
            time.sleep(LOOK_INTERVAL_S)
        seconds = time.perf_counter() - began
        self._process.communicate()
        return seconds


@contextlib.contextmanager
def _daemon(directory: Path) -> Iterator[str]:
    """A daemon with slots in shared memory; its endpoint."""
    home = directory / "daemon"
    home.mkdir()
    socket = home / "forged.sock"
    command = [sys.executable, "-m", "forged.cli.forged", "run", "--data-dir", str(home), "--socket", str(socket)]
    command += ["--listen", "127.0.0.1:0", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield f"unix://{socket}"
        finally:
            process.terminate()


if __name__ == "__main__":
    run("slots", measure)
