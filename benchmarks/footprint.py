"""Start-up time and memory of the daemon, and wall time of commands.

Start to ready is from the start of the process to its `ready` line, with an empty data directory. Memory is the
resident set after one idle second. Commands are compared with a Python process that does nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Figure, interleaved, main

ROUNDS = 9
READY_MAX_S = 0.6
MEMORY_MAX_MIB = 70.0
COMMAND_TIMES_MAX = 10.0
IDLE_S = 1.0


class _Daemon:
    """A daemon with a new data directory."""

    def __init__(self, directory: str) -> None:
        self.socket = f"{directory}/forged.sock"
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [
                *(str(Path(sys.executable).parent / "forged"), "run", "--data-dir", f"{directory}/data"),
                *("--socket", self.socket, "--listen", "127.0.0.1:0"),
            ],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.ready_s = time.perf_counter() - started
        if b"ready" not in line:
            raise RuntimeError("the daemon of this benchmark did not start")

    def memory_mib(self) -> float:
        """The resident set."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        return int(kib) / 1024

    def stop(self) -> None:
        """Stop it with SIGTERM."""
        self._process.terminate()
        self._process.communicate()


def _start_to_ready() -> float:
    with tempfile.TemporaryDirectory() as directory:
        daemon = _Daemon(directory)
        daemon.stop()
        return daemon.ready_s


def _wall(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _measure(quick: bool) -> Sequence[Figure]:
    rounds = 1 if quick else ROUNDS
    forgectl = str(Path(sys.executable).parent / "forgectl")
    with tempfile.TemporaryDirectory() as directory:
        daemon = _Daemon(directory)
        time.sleep(IDLE_S)
        memory_mib = daemon.memory_mib()
        times = interleaved(
            rounds,
            {
                "pass": lambda: _wall(sys.executable, "-c", "pass"),
                "status": lambda: _wall(forgectl, "--socket", daemon.socket, "status"),
                "import": lambda: _wall(sys.executable, "-c", "import forged.client"),
                "ready": _start_to_ready,
            },
        )
        daemon.stop()
    nothing_ms = times["pass"] * 1e3
    limit_ms = nothing_ms * COMMAND_TIMES_MAX
    return [
        Figure("start to ready, against the limit", "s", times["ready"], READY_MAX_S, 1.0, higher_is_better=False),
        Figure("idle memory, against the limit", "MiB", memory_mib, MEMORY_MAX_MIB, 1.0, higher_is_better=False),
        Figure(
            "forgectl status, against ten times python -c pass",
            "ms",
            times["status"] * 1e3,
            limit_ms,
            1.0,
            higher_is_better=False,
        ),
        Figure(
            "import forged.client, against python -c pass",
            "ms",
            times["import"] * 1e3,
            nothing_ms,
            None,
            higher_is_better=False,
        ),
    ]


if __name__ == "__main__":
    main("footprint", _measure)
